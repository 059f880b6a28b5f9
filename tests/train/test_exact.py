"""`train sft --exact`: two runs end with the same bits, also if one was stopped and went on."""

from __future__ import annotations

import hashlib
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from odc_triton.jobs.checkpoints.steps import verify
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.sft_options import SftOptions
from tests.faults.inject import Fault, run_with, struck
from tests.support import jobs, ranks, slow
from tests.support.deadlines import LONG_S
from tests.support.jobs import ENDED, STOPPED
from tests.support.sft_case import case, write_case

STEPS = 6
DEADLINE_S = 8.0  # where a rank is stopped; a busy machine could exceed a shorter one
NOT_OF_TIME = ("step", "loss", "lr", "grad_norm", "skipped", "repeated")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("exact"))


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    wanted = {"out": str(out), "steps": STEPS, "samples_per_rank": 2, "exact": True, "resume": "auto"}
    return case(folder, **wanted | changes)


def left(out: Path) -> tuple[str, list[dict]]:
    """A digest of the model, and what the metrics say that no clock does."""
    (weights,) = out.rglob("*.safetensors")
    lines = [{key: line[key] for key in NOT_OF_TIME} for line in read_metrics(out / "metrics.jsonl")]
    return hashlib.sha256(weights.read_bytes()).hexdigest(), lines


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[str, list[dict]]:
    """Also of a run by a queue, whose first minibatch is repeated: it has its packs again."""
    queued = options(folder, folder / "queued", steps=1, balance="queue")
    assert jobs.run(2, options(folder, folder / "whole"), queued) == [ENDED] * 2
    found = left(folder / "whole")
    (line,) = left(folder / "queued")[1]
    assert line["repeated"] == 1
    # Its packs have other samples than LB-Mini's: fp32 sums in another order.
    assert line == pytest.approx(found[1][0], rel=1e-5)
    return found


def test_the_same_bits_after_a_stop(folder: Path, tmp_path: Path, whole: tuple) -> None:
    wanted = options(folder, tmp_path / "out")
    assert jobs.run(2, wanted, stop_after=2) == [STOPPED]
    assert jobs.run(2, wanted) == [ENDED]
    digest, lines = left(tmp_path / "out")
    assert lines == whole[1]
    assert digest == whole[0]
    assert lines[0]["repeated"] == lines[-1]["repeated"] == 1  # the first minibatch's scales were guesses


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        (False, Fault(rank=0, phase="background", minibatch=4, moment=7)),
        slow(True, Fault(rank=0, phase="save", minibatch=3, moment=9)),
        slow(False, Fault(rank=1, phase="step", minibatch=4, signal=signal.SIGSTOP)),
    ],
    ids=lambda value: value.phase if isinstance(value, Fault) else None,
)
def test_the_same_bits_after_a_fault(folder: Path, tmp_path: Path, whole: tuple, told: bool, fault: Fault) -> None:
    """`told`: the survivor gets SIGTERM, as torchrun sends it."""
    out, scratch = tmp_path / "out", tmp_path / "tmp"
    scratch.mkdir()
    wanted = options(folder, out, checkpoint_every=2, checkpoint_background=fault.phase == "background")
    stops = fault.signal == signal.SIGSTOP
    at_fault = replace(wanted, timeout_minutes=DEADLINE_S / 60) if stops else wanted
    with ranks.start(run_with, 2, at_fault, fault, str(scratch)) as job:
        other, waited_s = struck(job, fault, told)
    # A rank whose training has already ended with the loss is killed by the signal.
    if not (told and other.signal == signal.SIGTERM):
        said = other.error.strip().splitlines()[-1]
        assert f"rank {fault.rank}" in said
        assert ("DeadlineExceeded" if stops else "RankLost") in said
    assert waited_s < LONG_S / 2 + (DEADLINE_S if stops else 0)
    assert list(scratch.iterdir()) == [], "temporary files stay"
    saved = sorted((out / "checkpoints").glob("step-*"))
    assert saved
    for path in saved:
        verify(path)
    assert ranks.run(run_with, 2, wanted, None, str(scratch)) == ["ended"] * 2
    assert left(out) == whole
    unfinished = [path.name for path in [*out.iterdir(), *(out / "checkpoints").iterdir()] if path.name[0] == "."]
    assert set(unfinished) <= {".lock"}
    assert list(scratch.iterdir()) == []


def test_two_runs_have_the_same_bits(folder: Path, tmp_path: Path) -> None:
    split = {"split_sequences": True, "token_cap": 128, "truncate": True, "gradient_checkpointing": True}
    how = {"steps": 3, "samples_per_rank": 1, "replace_layers": True, "fused_head": True, **split}
    wanted = [options(folder, tmp_path / name, **how, offload_activations=name == "other") for name in ("one", "other")]
    assert jobs.run(3, *wanted) == [ENDED] * 2
    assert left(tmp_path / "one") == left(tmp_path / "other")
    lines = (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["offloaded_bytes"] > 0 for line in lines)
