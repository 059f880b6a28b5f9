"""Evaluations that end a run early, and choose the model that it writes."""

from __future__ import annotations

import contextlib
import io
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.jobs.checkpoints.steps import Checkpoints
from odc_triton.jobs.train.grpo_run import GrpoRun
from odc_triton.jobs.train.loop import Loop
from odc_triton.jobs.train.run import RunState
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.jobs.train.sft_run import SftRun
from odc_triton.tools.cli.export import ExportOptions, export
from tests.support import jobs, ranks
from tests.support.jobs import ENDED
from tests.support.sft_case import case, write_case

# The eval_loss after each step: the fourth is the best until the last.
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.5, 5: 3.0, 6: math.nan, 7: 9.0, 8: 2.0}


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    wanted = {"steps": 8, "schedule": "constant", "keep": 1, "checkpoint_every": 3, "eval_fraction": 0.3}
    wanted |= {"eval_every": 1, "early_stopping": 2, "keep_best": True, "resume": "auto", "samples_per_rank": 2}
    return case(folder, out=str(out), **wanted | changes)


def train(rank: int, world: int, wanted: SftOptions, killed_at: int = 0) -> tuple[str, str]:
    """How the run ends and what it prints. `killed_at`: the step that is evaluated, and not saved."""
    save = Checkpoints.save

    def or_die(self: Checkpoints, *, step: int, **how: object) -> Path:
        if step == killed_at:
            raise RuntimeError("killed")
        return save(self, step=step, **how)

    with (
        mock.patch.object(SftRun, "mean_loss", lambda run, _: LOSSES[run.state.step]),
        mock.patch.object(Checkpoints, "save", or_die),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        (ended,) = jobs.train(rank, world, [wanted])
    return ended, printed.getvalue()


def saved(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))


def test_a_run_ends_early_with_the_best_model(tmp_path: Path) -> None:
    """To the bit that of the best step, also if it was killed after an evaluation, before that was saved."""
    folder, models = write_case(tmp_path, config={"hidden_size": 16}, records=16, characters=60), {}
    rows = {"best": (4, 0), "last": (6, 0), "killed at 4": (8, 4), "killed at 6": (8, 6)}  # steps, and where killed
    for name, (steps, killed_at) in rows.items():
        plain = {} if killed_at else {"early_stopping": 0, "keep_best": False, "eval_every": 0}
        wanted = options(folder, out := tmp_path / name, steps=steps, **plain)
        if killed_at:
            assert train(0, 1, wanted, killed_at)[0] == "RuntimeError: killed"
            assert saved(out) == {4: [2, 3], 6: [4]}[killed_at], "the best one so far, and the newest"
        ended, said = train(0, 1, wanted)
        assert ended == ENDED
        models[name] = load_file(out / "model" / "model.safetensors")
        if killed_at:
            assert "It ended early, before step 8: eval_loss has not improved in 2 evaluations in a row" in said
            assert "The model is that of step 4, the best, with eval_loss 2.5000 (--keep-best)." in said
            assert (len(jobs.lines(out)), saved(out)) == (6, [4, 6])
        assert all(torch.equal(value, models["best"][key]) for key, value in models[name].items()) == (name != "last")
    card = (out / "model" / "README.md").read_text()
    assert "in 4 steps" in card
    assert "2.5" in card
    export(str(out), ExportOptions(out=str(tmp_path / "exported")))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(value, models["best"][key]) for key, value in exported.items())
    assert "has ended after step 6" in train(0, 1, wanted)[1]
    branch = {"out": str(tmp_path / "branch"), "resume": str(out / "checkpoints" / "step-00000006")}
    assert "step-00000004 is gone" in (said := train(0, 1, replace(wanted, **branch, early_stopping=0))[1])
    assert "that of step 8" in said
    assert "--early-stopping was 2 and is 0" in train(0, 1, replace(wanted, early_stopping=0))[1]
    assert (len(jobs.lines(out)), saved(out)) == (8, [8])


@pytest.mark.slow
def test_all_ranks_end_together(tmp_path: Path) -> None:
    wanted = options(write_case(tmp_path), out := tmp_path / "out", checkpoint_background=True)
    assert [ended for ended, _ in ranks.run(train, 2, wanted)] == [ENDED, ENDED]
    assert (len(jobs.lines(out)), saved(out)) == (6, [4, 6])


def test_which_reward_is_better() -> None:
    given = {
        "options": mock.Mock(early_stopping=2),
        "measure": GrpoRun.measure,
        "more_is_better": GrpoRun.more_is_better,
    }
    run = mock.Mock(state=RunState(), was_skipped=False, **given)
    for reward, best, stale in [(math.nan, 0, 1), (0.2, 2, 0), (0.2, 2, 1), (0.5, 4, 0), (0.1, 4, 1), (None, 4, 1)]:
        run.state.step += 1
        GrpoRun.judge(run, {} if reward is None else {"eval_reward": reward})
        assert (run.state.best_step, run.state.stale) == (best, stale)
    run.options.early_stopping = 0
    GrpoRun.judge(run, {"eval_reward": 0.0})
    assert run.state.stale == 1, "a run without it never ends early, also if it is given later"
    run.was_skipped = True
    GrpoRun.judge(run, {"eval_reward": 1.0})
    assert run.state.best_step == 4, "the weights are those of another step"


@pytest.mark.parametrize("best_step", [0, 4])
def test_only_what_was_evaluated_is_kept(best_step: int) -> None:
    loop = mock.Mock()
    loop.checkpoints.best, loop.run.state = None, RunState(best_step=best_step)
    Loop._save(loop, prune=True, ends=True)
    assert (loop.checkpoints.best is not None) == bool(best_step)
