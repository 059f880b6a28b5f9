"""Decides, before anything imports triton, where kernels run: see bench/kernels/problem.py."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")
from tests.support import place as place  # noqa: E402

os.environ["ODC_TUNED"] = "off"  # what the tests measure must not depend on what was tuned here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-tables", metavar="FOLDER", help="write the tables that tests/tables shows to be right")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--write-tables"):
        from tests.support.tables import TableWriter
        from tests.tables import TABLES

        config.pluginmanager.register(TableWriter(Path(folder), TABLES))


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """A test that shards a model in this process makes a world of one, as a notebook does."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
