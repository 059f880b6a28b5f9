"""The stages that run pytest: all GPU tests but those that have a stage of their own, and these."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from .outcome import Outcome
from .process import run

FOUR, KILLED = "tests/gpu/test_four_processes.py", "tests/gpu/test_killed.py"
TESTS = (
    "tests/gpu",
    "tests/test_gathered.py",
    "tests/test_gathered_usage.py",
    "tests/test_hf_attention.py",
    "tests/kernels",
)
_TAIL_LINES = 40


def read_junit(path: Path) -> tuple[Counter[str], list[dict[str, str]]]:
    """Counts by outcome, and every failure: its test and the end of its text."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    failures = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            counts["failed"] += 1
            text = "\n".join((wrong[0].text or "").strip().splitlines()[-_TAIL_LINES:])
            failures.append({"test": f"{case.get('classname')}::{case.get('name')}", "text": text})
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, failures


def run_tests(
    paths: list[str],
    marker: str,
    environment: dict[str, str],
    seconds: float,
    *,
    stage: str = "tests",
    without: Sequence[str] = (),
) -> Outcome:
    """`pytest -m marker paths`, as far as it comes in the time; the order of `paths` is that of their worth.

    `without`: files that other stages run.
    """
    begin_s = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[dict[str, str]] = []
    unfinished: list[str] = []
    parallel = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as scratch:
        for number, path in enumerate(paths):
            left_s = seconds - (time.monotonic() - begin_s)
            junit = Path(scratch) / f"{number}.xml"
            # Processes of one test share the GPU with each other only: what they time out on is not other tests' work.
            workers = parallel if "kernels" in path else []
            command = [sys.executable, "-m", "pytest", "-q", "-m", marker, *workers, "-p", "no:cacheprovider"]
            # Warnings are errors where versions are pinned; that machine's are its own.
            command += ["-W", "default", "--timeout", "120", f"--junit-xml={junit}", path]
            command += [f"--ignore={each}" for each in without]
            code, text = run(command, environment, max(left_s, 1))
            tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
            if code is None:
                unfinished.append(path)
                failures.append({"test": f"{path}, stopped when its time was over", "text": tail})
                continue
            if not junit.exists() or code not in (0, 1, 5):  # 5: nothing was collected
                failures.append({"test": f"{path} as a whole", "text": tail})
                continue
            of_path, failed = read_junit(junit)
            counts += of_path
            failures += failed
    details = [", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))]
    details += [f"not finished in time: {path}" for path in unfinished]
    for failure in failures:
        details += ["", f"### {failure['test']}", "", "```", failure["text"], "```"]
    return Outcome(
        stage=stage,
        passed=not (failures or unfinished) and counts["passed"] > 0,
        seconds=time.monotonic() - begin_s,
        details=details,
        data={"counts": dict(counts), "failures": failures, "unfinished": unfinished},
    )
