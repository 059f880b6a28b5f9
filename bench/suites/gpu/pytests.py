"""A pytest plugin: appends every test's outcome to the file ODC_SUITE_LINES, as it comes.

Under xdist the controller writes, as it also hears of workers that die. A worker that has lost its CUDA context ends
itself: every later test would fail because of this one, and xdist starts another worker.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ...provenance import append_line

LINES, SECTION = "ODC_SUITE_LINES", "ODC_SUITE_SECTION"
_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_TEXT_CHARACTERS = 3000
_failed: set[str] = set()


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _failed.add(report.nodeid)
    if _WORKER or (report.passed and (report.when != "call" or report.nodeid in _failed)):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(getattr(report, "duration", 0.0), 2)}
    said = {} if report.passed else {"text": report.longreprtext[-_TEXT_CHARACTERS:]}
    append_line(Path(os.environ[LINES]), {"section": os.environ[SECTION], **line, **said})


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        pytest_runtest_logreport(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    torch = sys.modules.get("torch")
    if _WORKER and nodeid in _failed and torch is not None and torch.cuda.is_initialized():
        from ...device import Gpu

        os._exit(1) if not Gpu().answers() else None
