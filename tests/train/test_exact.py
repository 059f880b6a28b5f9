"""`train sft --exact`: two runs end with the same bits, also if one was stopped and went on."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

from odc_triton.train.metrics import read_metrics
from odc_triton.train.sft_options import SftOptions
from tests.faults.inject import Fault, run_with
from tests.support import ranks, slow
from tests.support.sft_case import case, write_case
from tests.train.test_resume import train

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
    assert ranks.run(train, 2, options(folder, folder / "whole"), None) == ["ended"] * 2
    return left(folder / "whole")


@pytest.mark.parametrize("stop", [2, *(slow(step) for step in (1, 3, 4))])
def test_the_same_bits_after_a_stop(folder: Path, tmp_path: Path, whole: tuple, stop: int) -> None:
    assert set(ranks.run(train, 2, options(folder, tmp_path / "out"), stop)) == {"stopped by SIGTERM"}
    assert ranks.run(train, 2, options(folder, tmp_path / "out"), None) == ["ended"] * 2
    digest, lines = left(tmp_path / "out")
    assert lines == whole[1]
    assert digest == whole[0]
    assert lines[0]["repeated"] == lines[-1]["repeated"] == 1  # the first minibatch's scales were guesses


def test_a_repeated_minibatch_of_a_queue_has_its_packs_again(folder: Path, tmp_path: Path, whole: tuple) -> None:
    wanted = options(folder, tmp_path / "out", steps=1, balance="queue")
    assert ranks.run(train, 2, wanted, None) == ["ended"] * 2
    (line,) = left(tmp_path / "out")[1]
    assert line["repeated"] == 1
    # Its packs have other samples than LB-Mini's: fp32 sums in another order.
    assert line == pytest.approx(whole[1][0], rel=1e-5)


KILLS = [
    Fault(rank=rank, phase=phase, minibatch=minibatch, moment=moment)
    for rank, phase, minibatch, moment in (
        (0, "forward", 0, 3),
        (1, "backward", 1, 5),
        (0, "lock", 2, 2),
        (1, "step", 2, 0),
        (0, "after step", 3, 0),
        (0, "metrics", 3, 1),
        (1, "save", 2, 1),
        (0, "save", 4, 3),
        (1, "forward", 5, 9),
        (0, "export", 5, 1),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", KILLS, ids=lambda fault: f"{fault.phase}-{fault.minibatch}")
def test_the_same_bits_after_a_kill(folder: Path, tmp_path: Path, whole: tuple, fault: Fault) -> None:
    (tmp_path / "tmp").mkdir()
    given = options(folder, tmp_path / "out", checkpoint_every=2), str(tmp_path / "tmp")
    with ranks.start(run_with, 2, given[0], fault, given[1]) as job:
        assert job.join()[fault.rank].signal == signal.SIGKILL
    assert ranks.run(run_with, 2, given[0], None, given[1]) == ["ended"] * 2
    assert left(tmp_path / "out") == whole


@pytest.mark.parametrize(
    "changes",
    [
        slow({"replace_layers": True, "fused_head": True}),
        slow({"gradient_checkpointing": True, "lora_rank": 2}),
        {"split_sequences": True, "token_cap": 128, "truncate": True},
        slow({"split_sequences": True, "token_cap": 128, "truncate": True, "gradient_checkpointing": True}),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_two_runs_have_the_same_bits(folder: Path, tmp_path: Path, changes: dict) -> None:
    found = []
    for name in ("one", "other"):
        wanted = options(folder, tmp_path / name, steps=3, samples_per_rank=1, **changes)
        assert ranks.run(train, 3, wanted, None) == ["ended"] * 3
        found.append(left(tmp_path / name))
    assert found[0] == found[1]
