"""Runs pytest so that no outcome is lost, and is the plugin by which pytest writes each one down as it comes.

The plugin works with pytest-xdist: only the controller, which sees the reports of all workers, writes. A worker whose
process dies is named by xdist with the test that it ran, and replaced; that is why a test that hangs in the GPU's
driver (where no signal reaches Python) ends with its worker, and a worker that lost its CUDA context ends itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .ledger import Ledger
from .process import run

# Of one test. More than the 120 s after which tests/support/ranks.py names the ranks that did not end.
TEST_S = 150
TAIL_LINES = 60
_TEXT_CHARACTERS = 6000
_ENVIRONMENT = "ODC_SUITE_OUTCOMES"


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])[-_TEXT_CHARACTERS:]


def run_tests(
    ledger: Ledger,
    stage: str,
    paths: Iterable[str],
    environment: dict[str, str],
    seconds: float,
    *,
    marker: str = "gpu",
    workers: int = 1,
    words: Iterable[str] = (),
    again: bool = False,
) -> dict[str, Any]:
    """`pytest -m marker paths` without those that passed before, and those that failed last; the order of `paths` is
    that of their worth. Whether all that was collected passed, now or before, and whether the time ran out.

    `workers`: 0 for none but pytest itself.
    """
    before = {} if again else ledger.stage(stage).tests
    known: dict[str, list[str]] = {"done": [], "failed": []}
    for test, record in before.items():
        known["failed" if record["outcome"] == "failed" else "done"].append(test)
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "given.json"
        given.write_text(json.dumps({"folder": str(ledger.folder), "key": ledger.key, "stage": stage} | known))
        command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "bench.gpu_suite.tests"]
        command += ["-p", "no:cacheprovider", "-p", "no:benchmark", "--continue-on-collection-errors"]
        # Warnings are errors where versions are pinned; that machine's are its own.
        command += ["-W", "default", "--timeout", str(TEST_S), "--timeout-method", "thread", *words]
        if importlib.util.find_spec("xdist"):
            command += ["-n", str(workers), "--maxschedchunk", "1"]
        code, text = run([*command, *paths], environment | {_ENVIRONMENT: str(given)}, seconds)
    found = ledger.stage(stage)
    if code not in (0, 1, 5):  # 5: nothing was left to run
        ledger.add("said", stage=stage, text=tail(text))
    return {
        "passed": code in (0, 5) and not found.failures and found.counts["passed"] > 0,
        "cut": code is None and not found.failures,
    }


class _Plugin:
    def __init__(self, given: dict[str, Any], *, writes: bool) -> None:
        self.ledger = Ledger(folder=Path(given["folder"]), key=given["key"])
        self.stage, self.writes = given["stage"], writes
        self.done, self.failed_before = set(given["done"]), set(given["failed"])
        self.seconds: dict[str, float] = {}
        self.texts: dict[str, str] = {}  # of failures: one may be followed by another, of its teardown or its worker
        self.failed = False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        passed = [item for item in items if item.nodeid in self.done]
        if passed:
            config.hook.pytest_deselected(items=passed)
        items[:] = [item for item in items if item.nodeid not in self.done]
        items.sort(key=lambda item: item.nodeid in self.failed_before)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.failed = False
        if self.writes:
            self.ledger.add("test begins", stage=self.stage, test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of setup, call and teardown the last one is written, or the first that failed or skipped."""
        self.failed |= report.failed
        if not self.writes:
            return
        seconds = self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + getattr(report, "duration", 0.0)
        if report.outcome != "passed" or report.when == "call":
            self._write(report.nodeid, report.outcome, seconds, report.longreprtext)

    def pytest_collectreport(self, report: Any) -> None:
        if self.writes and report.failed:
            self._write(report.nodeid, "failed", 0.0, report.longreprtext)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.failed and not self.writes and _context_is_lost():
            os._exit(1)  # every test after it would fail for this one's fault: xdist begins another worker

    def _write(self, test: str, outcome: str, seconds: float, text: str) -> None:
        if outcome == "failed":
            text = self.texts[test] = "\n\n".join(filter(None, [self.texts.get(test), tail(text)]))
        elif outcome == "passed":
            text = ""
        self.ledger.add("test", stage=self.stage, test=test, outcome=outcome, seconds=round(seconds, 2), text=text)


def _context_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    from bench.device import Gpu

    return not Gpu().answers()


def pytest_configure(config: Any) -> None:
    given = json.loads(Path(os.environ[_ENVIRONMENT]).read_text())
    config.pluginmanager.register(_Plugin(given, writes=not hasattr(config, "workerinput")))
