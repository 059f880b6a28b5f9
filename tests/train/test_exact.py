"""`train sft --exact`: two runs end with the same bits, also if one was stopped and went on."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

from odc_triton.train.metrics import read_metrics
from odc_triton.train.sft_options import SftOptions
from tests.faults.inject import Fault, run_with
from tests.support import jobs, ranks
from tests.support.jobs import ENDED, STOPPED
from tests.support.sft_case import case, write_case

STEPS = 6
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


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase", "moment"), [(0, "lock", 2), (0, "export", 1)])
def test_the_same_bits_after_a_kill(
    folder: Path, tmp_path: Path, whole: tuple, rank: int, phase: str, moment: int
) -> None:
    (tmp_path / "tmp").mkdir()
    given = options(folder, tmp_path / "out", checkpoint_every=2), str(tmp_path / "tmp")
    fault = Fault(rank=rank, phase=phase, minibatch=2, moment=moment)
    with ranks.start(run_with, 2, given[0], fault, given[1]) as job:
        assert job.join()[rank].signal == signal.SIGKILL
    assert ranks.run(run_with, 2, given[0], None, given[1]) == ["ended"] * 2
    assert left(tmp_path / "out") == whole


def test_two_runs_have_the_same_bits(folder: Path, tmp_path: Path) -> None:
    split = {"split_sequences": True, "token_cap": 128, "truncate": True, "gradient_checkpointing": True}
    how = {"steps": 3, "samples_per_rank": 1, "replace_layers": True, "fused_head": True, **split}
    wanted = [options(folder, tmp_path / name, **how) for name in ("one", "other")]
    assert jobs.run(3, *wanted) == [ENDED] * 2
    assert left(tmp_path / "one") == left(tmp_path / "other")
