"""`minibatch(model, plan=packs)`: targets, segments and the samples' checksum come from the packs of a sampler."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from odc_triton import begin_minibatch, fully_shard, minibatch
from odc_triton.balance import MinibatchSampler, PackedDataset, Plan, Segment, count_target_tokens, pack_collate
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.plan.queue import OwnCounter
from tests.support import ranks
from tests.support.refusals import caught, net

LENGTHS = [3, 5, 2, 7, 4, 6, 5, 3]
DATA = [{"input_ids": [at % 4] * length, "labels": [-100, *[1] * (length - 1)]} for at, length in enumerate(LENGTHS)]
TARGETS = [length - 1 for length in LENGTHS]


def _epoch(rank: int, world: int, **changes: object) -> DataLoader:
    how = {"samples_per_rank": 2, "token_cap": 9, "rank": rank, "world": world}
    sampler = MinibatchSampler(LENGTHS, **how | changes)
    return DataLoader(PackedDataset(DATA), batch_sampler=sampler, collate_fn=pack_collate, num_workers=0)


def _gradients(rank: int, world: int, given: str) -> list[tuple[int | None, list[torch.Tensor]]]:
    torch.manual_seed(0)
    model, found = fully_shard(net()), []
    for packs in _epoch(rank, world):
        arguments = {"plan": packs} if given == "plan" else {"tokens": count_target_tokens(packs), "split": packs.split}
        with minibatch(model, **arguments) as mb:
            for pack in packs:
                rows = pack["input_ids"].T.float().expand(-1, 4)
                (model(rows).sum() / mb.tokens).backward()
        found.append((mb.tokens, [p.grad.to_local().clone() for p in model.parameters()]))
        model.zero_grad()
    return found


REFUSED = (
    "rank 1 has other samples than rank 0: give every rank the same data set in the same order",
    "split and plan are given: leave split out",
    "plan is a list: give a rank's packs, as a sampler yields or pack_collate returns",
    "the plan does not know this rank's target tokens: give the packs that pack_collate returns",
    "this minibatch was given a split: call enable_split(model, tokens=…)",
    "the packs are those of rank 0 of 2, and this is rank 1 of 2: give the sampler the model's rank and world",
    "rank 1 assigns samples in another way than rank 0: give every rank's sampler the same balance",
    "OSError: disk gone",
)


def _raises() -> MinibatchPacks:
    raise OSError("disk gone")


def _refusals(rank: int, world: int) -> list[str]:
    model, packs = fully_shard(net()), next(iter(_epoch(rank, world)))
    segments = Plan.by_hand([[[Segment(0, 0, 2)]], [[Segment(0, 2, 3)]]]).packs(rank)
    given = (
        {"plan": next(iter(_epoch(rank, world, seed=rank)))},
        {"plan": packs, "split": segments.split},
        {"plan": [[1]]},
        {"plan": segments},
        {"plan": segments, "tokens": 1},
        {"plan": next(iter(_epoch(0, world)))},
        {"plan": next(iter(_epoch(rank, world, balance="micro" if rank else "mini")))},
        {"plan": _raises if rank else packs},
    )
    said = [caught(partial(begin_minibatch, model, **each)) for each in given]
    # A rank that knows of no samples, as its data failed, does not hide why.
    with minibatch(model, plan=packs if rank else MinibatchPacks(tokens=0)) as mb:
        assert mb.tokens == next(iter(_epoch(1, world))).tokens
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_as_with_tokens_and_split(world: int) -> None:
    ways = [ranks.run(_gradients, world, way) for way in ("plan", "tokens")]
    for of_rank in zip(*ways, strict=True):
        for (tokens, by_plan), (same, by_tokens) in zip(*of_rank, strict=True):
            assert tokens == same > 0
            torch.testing.assert_close(by_plan, by_tokens)  # ranks add in any order


def test_what_is_refused() -> None:
    for of_rank in ranks.run(_refusals, 2):
        assert [words for said, words in zip(of_rank, REFUSED, strict=True) if words not in said] == [], of_rank


@pytest.mark.parametrize("balance", ["mini", "micro", "queue"])
def test_targets_of_the_data_set_are_counted_once(balance: str) -> None:
    how = {"balance": balance, "targets": TARGETS, "counter": OwnCounter()}
    samplers = [MinibatchSampler(LENGTHS, 2, 9, rank=rank, world=2, **how) for rank in range(2)]
    for own in zip(*samplers, strict=True):
        names = own[0].plan.samples.names
        assert sum(each.tokens for each in own) == sum(TARGETS[name] for name in names)
    with pytest.raises(ValueError, match="targets has 1 numbers for 8 samples: give one for each"):
        MinibatchSampler(LENGTHS, 2, 9, targets=[3])
    for wrong, words in ((LENGTHS, r"targets\[0\] is 3, of 3 tokens"), ([1.5] * 8, "targets must be whole numbers")):
        with pytest.raises(ValueError, match=words):
            MinibatchSampler(LENGTHS, 2, 9, targets=wrong)


def _interrupted(rank: int, world: int) -> str:
    def plan() -> MinibatchPacks:
        raise KeyboardInterrupt

    model, packs = fully_shard(net()), next(iter(_epoch(rank, world)))
    try:
        begin_minibatch(model, plan=plan if rank else packs)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_ctrl_c_in_a_plan_is_told_at_once() -> None:
    first, second = ranks.run(_interrupted, 2, timeout_s=60)
    assert second == "KeyboardInterrupt: "
    assert "rank 1" in first
    assert "KeyboardInterrupt" in first
