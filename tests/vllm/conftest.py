"""One model and one server for all tests that leave them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_real import RealServer, vllm_serve, write_vllm_case


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vllm_case(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[RealServer]:
    with vllm_serve(folder / "start", folder / "server.log") as serving:
        yield serving
