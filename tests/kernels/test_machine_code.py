"""Cross-compiled machine code of the kernels, sm_90 here; `make aot` reads all architectures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_sm_90_is_as_it_should_be(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.aot", "--arch", "90", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if line.count("|") > 5}
    for name in ("linear bf16", "linear_dx fp16", "wgrad bf16"):
        assert "HGMMA" in lines[name]
    assert "UTMAREDG" in lines["wgrad bf16"]
    assert "sys.relaxed.add" in lines["scatter bf16"]
