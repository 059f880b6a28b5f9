"""Checks and tests: runs pytest so that no outcome is lost, and is the plugin that writes each one down as it comes.

A check is one short program that finds, within a minute, what may make everything else on a machine fail.

The plugin works with pytest-xdist: only the controller, which sees all workers' reports, writes. If a worker's process
dies, xdist names it with the test that it ran, and replaces it. That is why a test that hangs in the GPU's driver
(where no signal reaches Python) ends with its worker, and a worker that lost its CUDA context ends itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .outcomes import Ledger
from .process import run

# For one test. More than the LONG_S after which tests/support/ranks.py names the ranks that did not end.
TEST_S = 360
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
    """Runs `pytest -m marker paths`, most important path first, without the tests that passed before; those that failed
    come last. Returns whether all collected tests passed, now or before, and whether the time ran out.

    `workers`: 0 for pytest alone.
    """
    before = {} if again else ledger.stage(stage).tests
    known: dict[str, list[str]] = {"done": [], "failed": []}
    for test, record in before.items():
        known["failed" if record["outcome"] == "failed" else "done"].append(test)
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "given.json"
        given.write_text(json.dumps({"folder": str(ledger.folder), "key": ledger.key, "stage": stage} | known))
        command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "bench.suites.gpu.tests"]
        command += ["-p", "no:cacheprovider", "-p", "no:benchmark", "--continue-on-collection-errors"]
        # Warnings are errors where versions are pinned; that machine may have others.
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


# torch binds TMPDIR/symm_mem-PID, and the kernel takes 107 characters of it.
_SOCKET_CHARACTERS = 107 - len("/symm_mem-") - 7

# A fork server imports all of this before it forks a test's ranks: if a library initialised CUDA, no rank could.
_FORK = """
import os
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as tests/support/ranks.py sets it
import tests.support.preload, tests.support.models, torch
child = os.fork()
if not child:
    {touch}
    print("the child of a fork reaches its device", flush=True)
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1] != 0)
"""
# bench.kernels.run's best baseline for weight gradients, in torch since November 2025.
_ADDMM = """
import torch
a, b = torch.randn(64, 32, device="cuda").bfloat16(), torch.randn(32, 16, device="cuda").bfloat16()
out = torch.ones(64, 16, device="cuda")
torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
torch.testing.assert_close(out, 1 + a.float() @ b.float(), rtol=1e-3, atol=1e-3)
print(torch.__version__, "adds a product of bf16 to fp32")
"""


def run_checks(ledger: Ledger, environment: dict[str, str], *, rehearse: bool, deadline_s: float) -> bool:
    """Returns whether all passed; writes each down as it ends."""
    length = len(tempfile.gettempdir())
    folder = f"{tempfile.gettempdir()} has {length} characters, {_SOCKET_CHARACTERS} are allowed"
    results = [_write(ledger, "TMPDIR", length <= _SOCKET_CHARACTERS, folder, 0.0)]
    touch = "torch.zeros(1)" if rehearse else 'torch.cuda.init(); torch.zeros(1, device="cuda")'
    programs = {"fork": _FORK.format(touch=touch)}
    programs["addmm"] = "print('only a GPU has that product')" if rehearse else _ADDMM
    for name, program in programs.items():
        begin_s = time.monotonic()
        code, text = run([sys.executable, "-c", program], environment, max(deadline_s - begin_s, 1))
        said = tail(text) if code is not None else "the time ran out"
        results.append(_write(ledger, name, code == 0, said, time.monotonic() - begin_s))
    return all(results)


def _write(ledger: Ledger, name: str, passed: bool, text: str, seconds: float) -> bool:
    ledger.add("run", stage="checks", name=name, passed=passed, seconds=round(seconds, 1), data={"text": text})
    return passed


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
        """Writes the last of setup, call and teardown, or the first that failed or skipped."""
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
            os._exit(1)  # every later test would fail because of this one: xdist starts another worker

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
    from ...device import Gpu

    return not Gpu().answers()


def pytest_configure(config: Any) -> None:
    given = json.loads(Path(os.environ[_ENVIRONMENT]).read_text())
    config.pluginmanager.register(_Plugin(given, writes=not hasattr(config, "workerinput")))
