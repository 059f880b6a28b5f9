"""The bench of hybrid models runs: its small sizes time nothing, but gradients are compared and bytes are exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "hybrids.json"
    command = [sys.executable, "-m", "bench.suites.hybrids", str(out), "--quick"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=600)
    found = json.loads(out.read_text())
    assert all(found[part]["gradients_apart"] > 0 for part in ("split", "three_ranks", "group", "pair"))
    for row in found["memory"]:
        assert row["live_over_plan"] == pytest.approx(1, rel=0.03), row
