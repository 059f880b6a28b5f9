"""Every wait is needed: each is removed in turn from a copy of the package, and a test of that copy fails.

`tests/support/waits.py` lists them. A copy is tested by another process, in the copy's folder, so the tests and their
ranks import it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.waits import WAITS, Wait

_REPOSITORY = Path(__file__).parents[2]
_FOLDERS = {"odc_triton": "odc_triton", "kernels": "odc_kernels", "bench": "bench", "tests": "tests"}
_TIMEOUT_S = 240.0
# Of a test that can't run, or that hangs, instead of one that finds a fault.
_BROKEN = re.compile(r"\b((Import|ModuleNotFound|Syntax|Indentation|Name|UnboundLocal)Error|Timeout \(>)")


def _sources(root: Path, *names: str) -> dict[Path, str]:
    return {path: path.read_text() for name in names for path in (root / name).rglob("*.py")}


def _find(sources: dict[Path, str], wait: Wait) -> tuple[Path, re.Match[str]]:
    """Where it is written. Fails unless that is one place."""
    has_it = [(path, text) for path, text in sources.items() if wait.text in text]
    found = [(path, match) for path, text in has_it for match in wait.pattern.finditer(text)]
    advice = "update the table in tests/support/waits.py"
    assert found, f"the wait {wait.name!r} is no longer written as {wait.text!r}: {advice}"
    places = ", ".join(path.name for path, _ in found)
    assert len(found) == 1, f"the wait {wait.name!r}, {wait.text!r}, is found {len(found)} times, in {places}: {advice}"
    return found[0]


def test_every_wait_is_written_in_one_place_and_has_a_test() -> None:
    sources = _sources(_REPOSITORY, "odc_triton", "kernels")
    for wait in WAITS:
        _find(sources, wait)
        path, _, test = wait.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (_REPOSITORY / path).read_text(), f"there is no {wait.test}"


@pytest.fixture
def copy() -> Iterator[Path]:
    """A folder with the package, its kernels and its tests."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, as_name in _FOLDERS.items():
            # With compiled modules, as all are as old as their sources; not those that are being written.
            shutil.copytree(_REPOSITORY / name, Path(folder, as_name), ignore=shutil.ignore_patterns("*.pyc.*"))
        shutil.copy(_REPOSITORY / "pyproject.toml", folder)
        yield Path(folder)


def _remove(copy: Path, wait: Wait) -> None:
    path, match = _find(_sources(copy, "odc_triton", "odc_kernels"), wait)
    source = match.string
    path.write_text(source[: match.start("wait")] + wait.without + source[match.end("wait") :])


def _run(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=120", *tests],
        cwd=copy,
        env=ours | {"ODC_SIMULATED_STREAMS": "late", "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )


@pytest.mark.slow
def test_with_all_waits_the_tests_pass(copy: Path) -> None:
    result = _run(copy, *dict.fromkeys(wait.test for wait in WAITS))
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_ranks_import_the_copy(copy: Path) -> None:
    drain = next(wait for wait in WAITS if wait.name == "a drain waits for an engine's streams")
    _remove(copy, replace(drain, without='raise RuntimeError("of the copy")'))
    result = _run(copy, "tests/engine/test_gathered.py::test_another_order_is_still_right")
    assert result.returncode == 1, result.stdout
    assert "RuntimeError: of the copy" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.name)
def test_without_it_a_test_fails(copy: Path, wait: Wait) -> None:
    _remove(copy, wait)
    result = _run(copy, wait.test)
    assert result.returncode == 1, f"{wait.test} does not need it:\n{result.stdout}"
    assert f"\nFAILED {wait.test}" in result.stdout, result.stdout
    assert not _BROKEN.search(result.stdout), result.stdout
