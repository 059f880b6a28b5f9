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
from odc_triton.jobs.reports.report import curve_figure
from odc_triton.jobs.train.agreement import IdleTime
from odc_triton.jobs.train.metrics import Progress, in_two_lines
from odc_triton.jobs.train.outcome import _curves
from odc_triton.jobs.train.report_words import answers, in_words
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


@pytest.mark.parametrize(
    ("kind", "steps", "says"),
    [
        ({}, [{"loss": 4.0 - at} for at in range(4)], {"Did it learn?": "loss: 4.0000 → 1.0000"}),
        (
            {},
            [{"loss": 3.0}] * 4 + [{"loss": 2.0}] * 4,
            {"Did it learn?": "loss: 3.0000 → 2.0000 (means of the first and last 2 steps)"},
        ),
        (
            {"evaluates": True},
            [{"loss": 3.0, "eval_loss": 2.0}, {"loss": 3.0, "eval_loss": 1.0}, {"loss": 3.0, "eval_loss": 1.5}],
            {"Did it learn?": "eval_loss: 2.0000 → 1.5000, best 1.0000 after step 2: it got worse since"},
        ),
        (
            {"measure": "eval_reward", "more_is_better": True},
            [{"loss": 0.1, "reward": 0.5, "rollout_s": 0.5, "update_s": 0.25, "eval_reward": x} for x in (0.1, 0.2)],
            {
                "Did it learn?": "reward: 0.5000 → 0.5000\neval_reward: 0.1000 → 0.2000, best 0.2000 after step 2",
                "Where did time go?": "sampling 50%, rewards 0%, learning 25% of the time",
            },
        ),
        (
            {"job": "dpo"},
            [{"loss": 0.7, "rewards/accuracies": 0.5, "eval_rewards/accuracies": 0.75}] * 2,
            {"Did it learn?": "rewards/accuracies: 0.5000 → 0.5000\neval_rewards/accuracies: 0.7500 → 0.7500"},
        ),
        (
            {},
            [{"loss": 2.0, "idle": 0.5}],
            {"Where did time go?": "at most 2.00 times", "What next?": "much idle time"},
        ),
        ({"lora_rank": 4}, [{"loss": 2.0}], {"What next?": "`odc-triton export out --merge --out FOLDER`"}),
        ({"lora_rank": 4, "out": "my out"}, [{"loss": 2.0}], {"What next?": "`odc-triton export 'my out' --merge --o"}),
        ({"out": "my out"}, [{"loss": 2.0}], {"What next?": "--config 'my out/run.yaml' --resume"}),
        ({}, [], {"Did it learn?": "no step was taken", "What next?": "`--eval-data FILE` tells"}),
        ({"state": RunState(step=3)}, [{"loss": 2.0}], {"What next?": "run.yaml --resume auto --early-stopping 4`"}),
    ],
)
def test_answers_of_a_report(kind: dict[str, Any], steps: list[dict[str, Any]], says: dict[str, str]) -> None:
    usual = {"seconds": 1.0, "idle": 0.1, "tokens": 10}
    lines = [{"step": at, **usual, **each} for at, each in enumerate(steps, start=1)]
    given = {"model": "m", "init": None, "data": ["d"], "out": "out", "lora_rank": 0, "warmup_steps": 0, "lr": 0.1}
    given |= {"keep_best": False, "early_stopping": 2, "per_rank": "samples_per_rank"}
    run = {"options": SimpleNamespace(**given | kind), "kind": "train sft", "steps": 4, "measure": "eval_loss"}
    run |= {"more_is_better": False, "evaluates": False, "in_words": lambda: "it", "state": RunState(step=4)}
    found = answers(SimpleNamespace(**run | kind), lines, [])
    assert found["The run"] == "m on d: it"
    for question, text in says.items():
        assert text in found[question]
    assert ("--steps 8" in found["What next?"]) == ("state" not in kind)
    assert ("much idle time" in found["What next?"]) == any(line["idle"] > 0.15 for line in lines)
    assert ("worse" in found["Did it learn?"]) == ("evaluates" in kind)


def test_curves_of_a_branch_begin_at_its_first_step() -> None:
    (curves,) = _curves([{"step": step, "loss": 1 / step} for step in (8, 9, 10)])
    assert curve_figure(curves).axes[0].lines[0].get_xdata().tolist() == [8, 9, 10]


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
