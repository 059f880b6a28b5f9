"""`train grpo --overlap-rollout on`: the same update as in phases, with recorded completions and finishing times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.rl.policy_gradient import PolicyGradient
from odc_triton.jobs.rl.prompts import completion_seed
from odc_triton.jobs.train import grpo
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.grpo_run import GrpoRun
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.plan.entries import Entry, Segment
from odc_triton.plan.plan import MinibatchPacks, Plan
from odc_triton.plan.planner import Planner
from odc_triton.step import StepReport
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S
from tests.support.grpo_case import Recorded, case, write_prompts
from tests.support.sft_case import VOCABULARY

STEPS = 2
Packs = list[tuple[list, Plan | None]]  # of a rank, by step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("overlap"))


class Gated(Recorded):
    """Does not finish the last prompt of the first step before some rank has computed a pack: in phases, never."""

    def __init__(self, options: GrpoOptions, world: int) -> None:
        super().__init__(VOCABULARY, remotely=options.engine == "vllm-server")
        self.gate = Path(options.out).with_suffix(".computed")
        waits = options.overlaps and (world > 1 or self.samples_remotely)
        last = options.prompts_per_rank * world - 1
        self._last = completion_seed(options.seed, 0, last, 0) if waits else -1

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        if any(self._last in each.seeds for each in requests):
            until_s = time.monotonic() + LONG_S
            while not self.gate.exists():
                assert time.monotonic() < until_s, "nothing was computed while a prompt was left"
                time.sleep(1e-3)
        return super().generate(requests, options)


def train(rank: int, world: int, jobs: Sequence[tuple[GrpoOptions, int | None]]) -> list[Packs]:
    """This rank's packs in each of the jobs; those of an earlier job, in phases, where its number is given."""
    grpo._engine = lambda options, *_: Gated(options, world)
    found, step, collate, loss = [], GrpoRun.step, PolicyGradient.collate, PolicyGradient.loss

    def recorded(run: GrpoRun, plan: object, objective: PolicyGradient, **how: object) -> StepReport:
        found[-1].append(([], None))
        made = step(run, plan, objective, **how)
        found[-1][-1] = (found[-1][-1][0], plan.plan)
        return made

    def collated(objective: PolicyGradient, entries: list[Entry]) -> dict:
        found[-1][-1][0].append(entries)
        return collate(objective, entries)

    for options, replayed in jobs:
        found.append([])
        again = iter([MinibatchPacks(own, plan=plan) for own, plan in found[replayed or 0]])
        gate = Path(options.out).with_suffix(".computed")
        with (
            mock.patch("odc_triton.jobs.train.outcome.can_draw", return_value=False),
            mock.patch.object(GrpoRun, "step", recorded),
            mock.patch.object(PolicyGradient, "collate", collated),
            mock.patch.object(PolicyGradient, "loss", lambda *given: (gate.touch(), loss(*given))[1]),  # noqa: B023
            mock.patch.object(Planner, "packs", Planner.packs if replayed is None else lambda *_: next(again)),  # noqa: B023
        ):
            grpo.train_grpo(options)
    return found


def options(folder: Path, out: Path, **changes: object) -> GrpoOptions:
    usual = {
        "init": None,
        "model": str(folder / "start"),
        "steps": STEPS,
        "prompts_per_rank": 2,
        "decode_at_once": 3,  # one prompt
        "optimizer": "sgd",
        "lr": 1.0,
        "clip_norm": 1e9,
    }
    return case(folder, **usual | {"out": str(out)} | changes)


REMOTE = {"engine": "vllm-server", "vllm_server": "http://127.0.0.1:1", "importance": "token_truncate"}
SPLIT = {"split_sequences": True, "token_cap": 256, "split_tokens": 200, "max_new_tokens": 200}
CASES = {"split, remote": {**SPLIT, **REMOTE}}  # and exact sums
MORE = {
    "usual": {},
    "remote": REMOTE | {"decode_at_once": 12},
    "split": SPLIT,
    "kl, cispo": {"kl": 0.1, "loss": "cispo", "clip_high": 5.0, "lr": 0.3},
    "few teach": {"generations": 2, "prompts_per_rank": 1, "decode_at_once": 2},
    "nothing shared": {"share_prefixes": "off"},
}


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("world", "cases"), [(2, CASES), slow(1, CASES | {"usual": {}}), slow(3, CASES | MORE)], ids=str
)
def test_the_update_of_phases(folder: Path, tmp_path: Path, world: int, cases: dict[str, dict]) -> None:
    """With exact sums also the same bits, where the phased step has the overlapped one's packs."""
    wanted = {
        f"{name}, {how}": (options(folder, tmp_path / f"{name}, {how}", overlap_rollout=how, **changes), None)
        for name, changes in cases.items()
        for how in ("on", "off")
    }
    exact = [options(folder, tmp_path / f"exact, {how}", overlap_rollout=how, exact=True) for how in ("on", "off")]
    of_ranks = ranks.run(train, world, [*wanted.values(), (exact[0], None), (exact[1], len(wanted))])
    start = load_file(folder / "start" / "model.safetensors")
    for at, name in enumerate(cases):
        ours, phased = (tmp_path / f"{name}, {how}" for how in ("on", "off"))
        made, want = weights(ours), weights(phased)
        moved = max(float((want[each] - start[each]).abs().max()) for each in want)
        assert moved > 1e-3, f"{name}: the steps must change the weights for the comparison to say something"
        for each, value in want.items():
            # Besides, the last bit of a weight: of a norm's, about 1, it is 8e-6 of the largest move.
            apart = ((made[each] - value).abs() - torch.finfo(value.dtype).eps * value.abs()).max()
            assert float(apart) <= 5e-6 * moved, f"{name}: {each}, fp32 sums in another order"
        lines, others = read_metrics(ours / "metrics.jsonl"), read_metrics(phased / "metrics.jsonl")
        for line, other in zip(lines, others, strict=True):
            for key in ("loss", "reward", "length", "entropy", "ratio", "grad_norm", "tokens"):
                assert line[key] == pytest.approx(other[key], rel=2e-5, abs=1e-7), f"{name}: {key}"
            assert "hidden_s" not in other
        if world > 1 or "remote" in name:
            assert lines[0]["hidden_s"] > 0, name
        entries = [e for found in of_ranks for packs, _ in found[2 * at] for pack in packs for e in pack]
        if world > 1 and "split" in name:
            assert any(isinstance(each, Segment) for each in entries), f"{name}: no sample would be cut"
    made, want = (weights(tmp_path / f"exact, {how}") for how in ("on", "off"))
    assert all(torch.equal(made[name], want[name]) for name in want)
    for how in ("on", "off"):
        assert read_metrics(tmp_path / f"exact, {how}" / "metrics.jsonl")[0]["repeated"] == 1  # packs were run again
