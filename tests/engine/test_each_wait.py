"""Waits are needed: of each module that waits one is removed from a copy of the package, and a test of that copy fails.

A copy is tested by another process, in the copy's folder, so the tests and their ranks import it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_REPOSITORY = Path(__file__).parents[2]
_FOLDERS = {"odc_triton": "odc_triton", "kernels": "odc_kernels", "bench": "bench", "tests": "tests"}
_TIMEOUT_S = 240.0
# Of a test that can't run, or that hangs, instead of one that finds a fault.
_BROKEN = re.compile(r"\b((Import|ModuleNotFound|Syntax|Indentation|Name|UnboundLocal)Error|Timeout \(>)")
_STREAMS = "tests/engine/test_streams.py::test_"
_DRAINS = "tests/engine/test_drains.py::test_"
_SEQUENCE = "tests/sequence/test_"
_NEAR = "tests/kernels/test_near_and_far.py::test_"
_OFFLOAD = "tests/hf/test_offload.py::test_copies_follow_what_is_computed_and_come_before_they_are_used[late]"


@dataclass(frozen=True)
class Wait:
    """`text`: what waits, found once in all sources, with what stands before and after it; `without`: what takes its
    place. `test`: fails then, where simulated streams are late.
    """

    name: str
    text: str
    test: str
    without: str = "pass"
    after: str = ""
    before: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Finds `text` as its group "wait", whatever object it is called on."""
        called_on = r"\b(?:\w+\.)*" if self.text[0].isidentifier() else ""
        after = rf"{re.escape(self.after)}\s+" if self.after else ""
        before = rf"(?=\s*{re.escape(self.before)})" if self.before else ""
        return re.compile(f"{after}(?P<wait>{called_on}{re.escape(self.text)}){before}")


WAITS = (
    Wait(
        "a copy from peers waits for what was computed before",
        "stream.wait_stream(copies.home)",
        _STREAMS + "copies_follow_what_is_computed_before[late]",
    ),
    Wait(
        "a drain waits for additions",
        "for stream in (*self._computing, *self._copy, self._add):",
        _STREAMS + "additions_follow_what_is_computed_before[late]",
        "for stream in (*self._computing, *self._copy):",
    ),
    Wait(
        "at the exit gradients are added before the barrier",
        'drain(f"the microbatches of minibatch {self.number}")',
        _DRAINS + "peers_see_what_the_device_has_done",
    ),
    Wait(
        "an evaluation waits for what peers publish",
        "wait_readable()",
        "tests/engine/test_evaluation.py::test_rank_0_alone_right_after_its_step",
        after="if not protocol.is_open or (protocol.reads_only and protocol.is_alone):",
    ),
    Wait(
        "a forward or backward of a unit waits for its parameters",
        "unit.wait()",
        "tests/engine/test_gathered.py::test_tied_over_units",
    ),
    Wait(
        "others' experts are used after they are copied",
        "self.slots.streams.wait(copies)",
        "tests/nn/test_experts.py::test_where_shards_are_apart[2]",
        after="values, copies = ahead.popleft()",
    ),
    Wait(
        "keys and values are copied after their flags have come",
        "self._wait()",
        _SEQUENCE + "order.py::test_keys_and_values_are_read_after_their_flags_have_come[True]",
        after="def copy() -> None:",
    ),
    Wait(
        "a flag says that gradients of keys are added after they are",
        "after_adds(",
        _SEQUENCE + "order.py::test_a_flag_follows_the_additions_and_these_follow_earlier_ranks_if_in_order[True]",
        "(lambda work: work())(",
        before="partial(",
    ),
    Wait("what was on the host is used after it has come back", "self._streams.follow_adds()", _OFFLOAD),
    Wait(
        "a buffer is filled again after it was read",
        "staged.stream.wait_event(staged.read)",
        _NEAR + "a_buffer_is_filled_again_after_it_was_read[None]",
    ),
    Wait(
        "the head waits for the rows of a part",
        "compute.wait_event(arrived)",
        _NEAR + "the_heads_parts_come_before_they_are_read_and_stay_till_then[late-False]",
    ),
)


def _sources(root: Path, *names: str) -> dict[Path, str]:
    return {path: path.read_text() for name in names for path in (root / name).rglob("*.py")}


def _find(sources: dict[Path, str], wait: Wait) -> tuple[Path, re.Match[str]]:
    """Where it is written. Fails unless that is one place."""
    has_it = [(path, text) for path, text in sources.items() if wait.text in text]
    found = [(path, match) for path, text in has_it for match in wait.pattern.finditer(text)]
    advice = "update WAITS"
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
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.name)
def test_without_it_a_test_fails(copy: Path, wait: Wait) -> None:
    _remove(copy, wait)
    result = _run(copy, wait.test)
    assert result.returncode == 1, f"{wait.test} does not need it:\n{result.stdout}"
    assert f"\nFAILED {wait.test}" in result.stdout, result.stdout
    assert not _BROKEN.search(result.stdout), result.stdout
