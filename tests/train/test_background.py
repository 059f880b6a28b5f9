"""A run's last step and its failures, while an earlier checkpoint is still being written in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from odc_triton import MinibatchFailed
from odc_triton.checkpoint.background import BackgroundCheckpoints
from odc_triton.checkpoint.steps import Checkpoints, verify
from odc_triton.train import sft_run
from odc_triton.train.sft import train_sft
from odc_triton.train.sft_options import SftOptions
from tests.checkpoint.test_background import writers_held_back
from tests.support.checkpointed import writers
from tests.support.sft_case import case, write_case

SAVED, STEPS = 3, 4


@pytest.fixture
def wanted(tmp_path: Path) -> SftOptions:
    """Saves step 3 in the background, then the last one; the later removes the earlier."""
    how = {"samples_per_rank": 1, "checkpoint_every": SAVED, "keep": 1, "checkpoint_background": True}
    return case(write_case(tmp_path / "case"), out=str(tmp_path / "out"), steps=STEPS, **how)


@pytest.fixture(autouse=True)
def as_slow_as_can_be() -> Iterator[None]:
    """The writer writes nothing before the run waits for it."""
    wait = BackgroundCheckpoints.wait

    with writers_held_back() as go_on:

        def waiting(background: BackgroundCheckpoints, **how: float) -> None:
            if not background.is_idle:
                go_on.set()
            wait(background, **how)

        with (
            mock.patch.object(BackgroundCheckpoints, "wait", waiting),
            mock.patch("odc_triton.train.outcome.can_draw", return_value=False),
        ):
            yield


def kept(wanted: SftOptions) -> list[str]:
    found = Checkpoints(Path(wanted.out) / "checkpoints", keep=1).all()
    for path in found:
        verify(path)
    assert writers() == []
    return [path.name for path in found]


def test_the_last_checkpoint_waits_for_the_one_before(wanted: SftOptions) -> None:
    train_sft(wanted)
    assert kept(wanted) == [f"step-{STEPS:08d}"]


def test_a_failed_minibatch_leaves_the_checkpoint_being_written_whole(
    wanted: SftOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    router_predictions, calls = sft_run.router_predictions, iter(range(STEPS))

    def failing(*given: object) -> torch.Tensor:
        if next(calls) == SAVED:
            raise ZeroDivisionError("in the minibatch after the save")
        return router_predictions(*given)

    monkeypatch.setattr(sft_run, "router_predictions", failing)
    with pytest.raises(MinibatchFailed, match="in the minibatch after the save"):
        train_sft(wanted)
    assert kept(wanted) == [f"step-{SAVED:08d}"]
