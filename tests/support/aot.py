"""Runs `bench.kernels.aot` as a test, in a separate process: kernels interpreted in this one can't be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.deadlines import LONG_S

ROOT = Path(__file__).resolve().parents[2]


def compiled(
    out: Path, *arguments: str, timeout_s: float = LONG_S
) -> tuple[int, dict[tuple[str, int], dict[str, Any]]]:
    """The exit code, and the findings by (case's name, architecture). `out` keeps results between runs."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.kernels.aot", "--out", str(out), "--processes", "1", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    print(done.stdout, done.stderr, sep="\n")
    codes = json.loads((out / "aot.json").read_text())
    return done.returncode, {(code["name"], code["arch"]): code for code in codes}
