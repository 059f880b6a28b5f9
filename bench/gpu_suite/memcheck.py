"""The stage that looks for accesses out of bounds: NVIDIA's compute-sanitizer over every kernel on small shapes."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time

from .outcome import Outcome
from .process import run

_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_TAIL_LINES = 80
_SHARE = 0.7  # of the time in which cells are begun: one may take long under the tool


def find_tool(environment: dict[str, str]) -> str | None:
    """compute-sanitizer, on the PATH or in the CUDA toolkit's usual places; None where it is not."""
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [environment.get("PATH", os.defpath), *(os.path.join(home, "bin") for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run_memcheck(environment: dict[str, str], seconds: float) -> Outcome:
    """`bench.run --check` under memcheck, every tensor an allocation of its own. Passes where there is no such tool."""
    begin_s = time.monotonic()
    tool = find_tool(environment)
    if tool is None:
        return Outcome(stage="memcheck", passed=True, seconds=0.0, details=["compute-sanitizer is not present"])
    with tempfile.TemporaryDirectory() as scratch:
        command = [tool, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-m", "bench.run", "--check"]
        command += ["--world", "2", "--seconds", f"{seconds * _SHARE:.0f}", "--out", scratch]
        code, text = run(command, environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, seconds)
    summary = _SUMMARY.search(text)
    errors = int(summary.group(1)) if summary else None
    said = "stopped before it had a summary" if errors is None else f"{errors} errors"
    return Outcome(
        stage="memcheck",
        passed=code == 0 and errors == 0,
        seconds=time.monotonic() - begin_s,
        details=[f"compute-sanitizer: {said}; exit code {code}", "", "```", *text.splitlines()[-_TAIL_LINES:], "```"],
        data={"exit": code, "errors": errors},
    )
