"""`train sft`: a job on several ranks, also one that goes on on others, trains as on one rank with unsplit samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.plan.entries import Segment
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.plan.planner import Planner
from odc_triton.plan.samples import Samples
from tests.support import jobs, ranks, slow
from tests.support.sft_case import case, write_questions

STEPS, STOP, STEP_SAMPLES = 4, 1, 8
CAP = 128
Shape = tuple[int, int]  # replicas, ranks of each


@dataclass(frozen=True, kw_only=True)
class Job:
    """`learned`: options that decide what is learned; `how`: those that must not. `stopped`: where it runs until a stop
    in its second step, before it goes on as `shape`. `rtol`: of losses; of weights it is half of that.
    """

    learned: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    shape: Shape = (1, 2)
    stopped: Shape | None = None
    rtol: float = 2e-5  # fp32 sums in another order, which AdamW amplifies


SPLIT = {"split_sequences": True, "token_cap": CAP}
SHARED = {"share_prefixes": True, "lr": 3e-3}
MUON = {"optimizer": "muon", "lr": 1e-2, "clip_norm": 10.0}
MIXTURE = {"data": ("data.jsonl", "alone.jsonl"), "data_weight": (1.0, 2.0)}
EVALUATED = {"eval_fraction": 0.2}
LAYERS = {"gradient_checkpointing": True, "replace_layers": True, "fused_head": True}

JOBS = {
    "split, in replicas at first": Job(learned=EVALUATED, how=SPLIT, stopped=(2, 2)),
    "split, by a queue": Job(learned=EVALUATED, how=SPLIT | {"balance": "queue"}, stopped=(1, 4)),
    "a mixture of shared prefixes": Job(learned=SHARED | MIXTURE | EVALUATED, stopped=(1, 2)),
    # Newton-Schulz is in bf16: the last bits of a gradient become 1e-3 of an update.
    "Muon, in replicas": Job(learned=MUON, shape=(2, 1), stopped=(2, 2), rtol=0.01),
}
MORE = {
    "split, of shared prefixes": Job(learned=SHARED, how=SPLIT),
    # Ranks have other blocks than one rank; resumed by another number of ranks.
    "8-bit AdamW": Job(learned={"optimizer": "adamw-8bit"}, shape=(2, 1), stopped=(1, 4), rtol=0.02),
    "split over more ranks than at first, in replicas": Job(learned=EVALUATED, how=SPLIT, shape=(2, 2), stopped=(1, 2)),
    "all at once": Job(learned=SHARED, how=SPLIT | LAYERS | {"exact": True}, shape=(1, 4), stopped=(1, 2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("jobs"))


def options(folder: Path, out: Path, shape: Shape, changes: dict[str, Any]) -> SftOptions:
    replicas, each = shape
    usual = {"steps": STEPS, "truncate": False, "resume": "auto", "out": str(out), "data": ("data.jsonl",)}
    changes = usual | changes | {"replicas": replicas, "samples_per_rank": STEP_SAMPLES // (replicas * each)}
    return case(folder, **changes | {"data": tuple(str(folder / name) for name in changes["data"])})


def train(rank: int, world: int, wanted: Sequence[SftOptions], stop_after: int | None) -> list[tuple[str, int]]:
    """How each job ended, and the branches in this rank's packs. On one rank samples are whole, in the same order."""
    own, found, branches = Planner.packs, [], 0

    def counted(self: Planner, rows: Samples, rank: int) -> MinibatchPacks:
        nonlocal branches
        packs = own(self, replace(rows, prefixes=None) if world == 1 else rows, rank)
        if self.balance != "queue":
            branches += sum(isinstance(each, Segment) and each.parent is not None for pack in packs for each in pack)
        return packs

    with mock.patch.object(Planner, "packs", counted):
        for each in wanted:
            branches = 0
            (ended,) = jobs.train(rank, world, [each], stop_after)
            found.append((ended, branches))
    return found


def launch(wanted: dict[str, SftOptions], world: int, stop_after: int | None = None) -> None:
    """Each job ends, or is stopped and saved; those whose samples share prefixes have branches in their packs."""
    by_rank = ranks.run(train, world, [*wanted.values()], stop_after)
    for (name, each), *of_ranks in zip(wanted.items(), *by_rank, strict=True):
        assert {ended for ended, _ in of_ranks} == {jobs.STOPPED if stop_after else jobs.ENDED}, name
        assert (sum(count for _, count in of_ranks) > 0) == (each.share_prefixes and world > 1), name
        if stop_after:
            saved = [path.name for path in Path(each.out, "checkpoints").glob("step-*")]
            assert saved == [f"step-{stop_after + 1:08d}"], name


@pytest.mark.parametrize("table", [JOBS, slow(MORE)], ids=["usual", "more"])
def test_as_on_one_rank(folder: Path, tmp_path: Path, table: dict[str, Job]) -> None:
    learned = {str(job.learned): job.learned for job in table.values()}
    alone = {each: tmp_path / f"alone {number}" for number, each in enumerate(learned)}
    launch({each: options(folder, alone[each], (1, 1), changes) for each, changes in learned.items()}, 1)
    for stop_after in (STOP, None):
        shapes = {name: job.stopped if stop_after else job.shape for name, job in table.items()}
        by_world: dict[int, dict[str, SftOptions]] = {}
        for name, shape in shapes.items():
            if shape is not None:
                changes = table[name].learned | table[name].how
                by_world.setdefault(math.prod(shape), {})[name] = options(folder, tmp_path / name, shape, changes)
        for world, wanted in by_world.items():
            launch(wanted, world, stop_after)

    for name, job in table.items():
        outs = tmp_path / name, alone[str(job.learned)]
        found, want = map(jobs.lines, outs)
        for key in ("loss", "grad_norm", "tokens", "epoch", "eval_loss"):
            values, wanted = ([line[key] for line in lines if key in line] for lines in (found, want))
            assert values == pytest.approx(wanted, rel=job.rtol, abs=0), (name, key)
        assert want[-1]["loss"] < want[0]["loss"], name
        weights, want = (load_file(out / "model" / "model.safetensors") for out in outs)
        norm = torch.stack([each.norm() for each in want.values()]).norm()
        error = torch.stack([(weights[key] - each).norm() for key, each in want.items()]).norm()
        assert error < job.rtol / 2 * norm, name
