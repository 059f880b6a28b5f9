"""The benches that kill and delay runs: small ones of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.provenance import ROOT
from tests.support.deadlines import LONG_S


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    command = [sys.executable, "-m", "bench.suites.kills", "--strikes", "2", "--kinds", "sft", "sweep"]
    subprocess.run([*command, f"--within-s={LONG_S}", f"--out={out}"], check=True, cwd=ROOT, timeout=LONG_S)
    report = json.loads(out.read_text())["kills"]
    assert [(of["kind"], len(of["strikes"])) for of in report["kinds"]] == [("sft", 1), ("sweep", 1)]


@pytest.mark.slow
def test_a_soak_grows_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.suites.soak", "--minutes", "0", "--steps", "12", "--kinds", "split"]
    subprocess.run(
        [*command, f"--out={out}"], cwd=ROOT, timeout=LONG_S
    )  # growth depends on what a short run is seen at
    (run,) = json.loads(out.read_text())["soak"]["runs"]
    assert run["pauses"] > 0
    assert not [words for words in run["wrong"] if words.startswith("it ")]
