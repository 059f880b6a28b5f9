"""The benches that kill and delay runs: small ones of each, and what they want of a run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.provenance import ROOT
from bench.suites.kill_checks import (
    CTRL_C,
    FREEZE,
    KILL,
    LAUNCHER,
    TERM,
    differences,
    held,
    is_right_end,
    left_of,
    lost_lines,
    metrics_lines,
)
from bench.suites.soak import FEW_LOOKS, Watch
from tests.support.deadlines import LONG_S

KILLED = "odc-triton: rank 1 failed first: its process was killed by SIGKILL (out of memory?)\n"
TORCHRUN = """Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 12)
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 13)
"""
WARNED = "rank 0 has waited 15.0 s for rank 1 at the end of minibatch 2\n"


@pytest.mark.parametrize(
    ("how", "rank", "status", "said", "is_right"),
    [
        (KILL, 1, 1, KILLED, True),
        (KILL, 0, 1, KILLED, False),
        (KILL, 1, 0, "", False),  # it should have ended
        (KILL, 1, None, KILLED, False),  # it had to be ended
        (KILL, 1, 1, f"{KILLED}odc-triton: rank 0 failed first: rank 1 died\n", False),
        (FREEZE, 1, 1, "odc-triton: rank 0 failed first: rank 0 has waited 30.1 s for rank 1 at the end", True),
        (FREEZE, 1, 1, "odc-triton: rank 0 failed first: rank 0 waited 30 s for ranks [1] to open the", True),
        (FREEZE, 1, 1, f"{WARNED}odc-triton: rank 2 failed first: rank 2 has waited 30.1 s for rank 0 at", False),
        (FREEZE, 1, 1, "odc-triton: rank 0 failed first: rank 0 has waited 30.1 s for ranks 1, 2 at the end", False),
        (TERM, 0, 143, "", True),
        (TERM, 0, -15, "", True),  # before it had a handler
        (TERM, 0, 130, "", False),
        (TERM, 0, 1, "odc-triton: rank 0 failed first: KeyError", False),
        (TERM, 0, 0, "", False),
        (CTRL_C, 0, 130, "", True),
        (LAUNCHER, 0, -9, "", True),
        (LAUNCHER, 0, 1, "", False),
    ],
)
def test_ends_of_runs(how: str, rank: int, status: int | None, said: str, is_right: bool) -> None:
    assert is_right_end(how, rank, status, said, is_ours=True, is_done=False) == is_right
    if status == 0:
        assert is_right_end(how, rank, status, said, is_ours=True, is_done=True)


def test_ends_of_programs() -> None:
    for rank, is_right in ((0, True), (1, False)):
        assert is_right_end(KILL, rank, 1, TORCHRUN, is_ours=False, is_done=False) == is_right
    assert is_right_end(TERM, 0, 1, "", is_ours=False, is_done=False), "torchrun's status"


def _written(folder: Path, steps: list[int], *, loss: float = 1.0, weights: bytes = b"a") -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss, "grad_norm": 1.0}) + "\n" for step in steps]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"st')  # a torn one
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_runs_that_differ(tmp_path: Path) -> None:
    want = _written(tmp_path / "want", [1, 2])
    for name, given, with_bits, wrong in (
        ("alike", {}, True, []),
        ("weights", {"weights": b"b"}, True, ["other models: ['model.safetensors']"]),
        ("rounded", {"weights": b"b", "loss": 1.0001}, False, []),
        ("loss", {"loss": 1.1}, False, ["another loss in step 1", "another loss in step 2"]),
        ("steps", {"steps": [1, 1, 2]}, True, ["it has the steps {'metrics.jsonl': [1, 1, 2]}"]),
    ):
        got = _written(tmp_path / name, **{"steps": [1, 2]} | given)
        assert differences(got, want, with_bits=with_bits) == wrong, name
    (empty := tmp_path / "empty").mkdir()
    assert len(differences(empty, empty, with_bits=True)) == 2, "nothing is not alike"


def test_lost_steps(tmp_path: Path) -> None:
    before = metrics_lines(_written(tmp_path / "a", [1, 2, 3, 4, 5]))
    after = metrics_lines(_written(tmp_path / "b", [1, 2, 3]))
    after["metrics.jsonl"] += ["4, again", "5, again"]
    assert not lost_lines(before, after, interval=3)
    assert not lost_lines(before, after, interval=2)
    assert lost_lines(before, after, interval=1) == [
        "metrics.jsonl: it had 5 steps, and went on after 3, not 4 or more"
    ]
    assert lost_lines(before, {}, interval=3), "it has begun again"


@contextlib.contextmanager
def _shared_file() -> Iterator[str]:
    path = Path(f"/dev/shm/odc-test-{os.getpid()}")
    try:
        with path.open("wb"):
            yield str(path)
    finally:
        path.unlink()


def test_what_a_process_holds() -> None:
    with _shared_file() as name:
        assert name in (names := held([psutil.Process()]))
        assert name in left_of(names)
    assert name not in left_of(names)


def test_growth() -> None:
    look: dict[str, Any] = {"bytes": 100, "files": 10, "threads": 4}
    assert not Watch([look] * FEW_LOOKS, [look] * FEW_LOOKS).wrong()
    assert Watch([look] * FEW_LOOKS, [look | {"bytes": 120}] * FEW_LOOKS).wrong() == ["bytes: [100, 120]"]
    assert Watch([look] * FEW_LOOKS, [look]).wrong() == [f"it was looked at [{FEW_LOOKS}, 1] times"]


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    command = [sys.executable, "-m", "bench.suites.kills", "--strikes", "6", "--kinds", "sft", "sweep"]
    subprocess.run([*command, f"--within-s={LONG_S}", f"--out={out}"], check=True, cwd=ROOT, timeout=4 * LONG_S)
    report = json.loads(out.read_text())["kills"]
    assert [(of["kind"], len(of["strikes"])) for of in report["kinds"]] == [("sft", 3), ("sweep", 3)]
    assert {KILL} <= {strike["how"] for of in report["kinds"] for strike in of["strikes"]}


@pytest.mark.slow
def test_a_soak_waits_for_all(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.suites.soak", "--minutes", "0", "--steps", "60", "--kinds", "split"]
    subprocess.run([*command, f"--out={out}"], cwd=ROOT, timeout=4 * LONG_S)
    (run,) = json.loads(out.read_text())["soak"]["runs"]
    assert run["pauses"] > 0
    assert not [words for words in run["wrong"] if not words.startswith("it was looked at")], "looks depend on speed"
