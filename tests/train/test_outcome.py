"""What a run says at its end."""

from __future__ import annotations

import io
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from odc_triton import fully_shard
from odc_triton.engine.api import engine_of
from odc_triton.jobs.train.agreement import IdleTime
from odc_triton.jobs.train.metrics import Progress, in_two_lines
from odc_triton.jobs.train.outcome import in_words
from odc_triton.jobs.train.run import Run, RunState
from tests.support import ranks

NOTHING = "Nothing was learned: in no step did the rewards of a prompt's completions differ."


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([{"reward": 0.1, "groups_learned": 0.0}] * 2, True),
        ([{"reward": None, "groups_learned": 0.0}], True),  # no function applied
        ([{"reward": 0.1, "groups_learned": 0.0}, {"reward": 0.2, "groups_learned": 0.25}], False),
        ([{"reward": 0.1, "groups_learned": 0.0, "divergence": 0.3}], False),  # from a teacher
        ([{"loss": 2.0}], False),
        ([], False),
    ],
)
def test_nothing_was_learned(steps: list[dict[str, Any]], says: bool) -> None:
    usual = {"seconds": 1.0, "idle": 0.1, "tokens": 10, "skipped": 0, "loss": 0.0}
    lines = [{"step": at, **usual, **each} for at, each in enumerate(steps, start=1)]
    assert (NOTHING in in_words(lines, ranks=1)) is says


@pytest.mark.parametrize(
    ("sample", "lines"),
    [
        (
            {"prompt": "two\n words", "completion": "a\x1b[31mb", "reward": 1.0, "advantage": -0.5},
            ("prompt: two words", "  completion (reward 1, advantage -0.5): a�[31mb"),
        ),
        (
            {"prompt": "x" * 301, "completion": "y" * 301, "reward": None, "advantage": 0.0},
            (f"prompt: …{'x' * 300}", f"  completion (advantage 0): {'y' * 300}…"),
        ),
    ],
)
def test_a_completion_in_two_lines(sample: dict, lines: tuple[str, str]) -> None:
    assert in_two_lines(sample) == lines


def test_a_console_that_cannot_write_a_completion_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    with Progress(total=2, done=0, shown=True) as progress:
        progress.show({}, ["completion: é…"])
        assert written.buffer.getvalue() == b"completion: ??\n"
        written.close()
        progress.show({}, ["another"])


def _sound(rank: int, world: int) -> list[bool]:
    model = fully_shard(nn.Linear(2, 2))
    engine, found = engine_of(model), []
    run = SimpleNamespace(model=model, engine=engine, idle=IdleTime(engine.events), state=RunState(step=2, skipped=1))
    for bad in (None, 1):
        if rank == bad:
            model.weight.to_local().detach().fill_(math.nan)
        found.append(Run.is_sound(run))
    return found


def test_weights_are_sound_if_they_are_on_all_ranks() -> None:
    """A rank whose own are not still meets the others."""
    assert ranks.run(_sound, 2) == [[True, False]] * 2
