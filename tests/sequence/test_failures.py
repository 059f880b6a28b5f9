"""What goes wrong while ranks compute segments of a sample: every rank hears the cause, and the next minibatch
works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from odc_triton import MinibatchFailed, enable_split, fully_shard, minibatch
from odc_triton.balance import CostModel, PackedDataset, count_target_tokens, pack_collate
from odc_triton.hf import summed_loss
from odc_triton.plan.entries import Segment
from odc_triton.plan.plan import MinibatchPacks, Plan
from odc_triton.plan.relatives import find_relatives
from odc_triton.plan.segments import SplitPlan
from odc_triton.sequence.sums import SampleSums
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.planned import shared
from tests.support.refusals import caught
from tests.support.splitting import (
    DEALS,
    Setup,
    build,
    packs_of,
    raises_in_forward,
    require_plain,
    samples,
    sharded,
    step_on,
)

SETUP = Setup(deal="zigzag")


def right_after(model: torch.nn.Module, setup: Setup, rank: int) -> None:
    """One more minibatch is as if nothing had been."""
    model.zero_grad()
    _, found = step_on(model, setup, rank)
    require_plain(found, Setup(prefix=setup.prefix, family=setup.family))


def _constant(model: torch.nn.Module, pack: dict) -> torch.Tensor:

    return summed_loss(model, pack).detach() * torch.ones((), requires_grad=True)


def _without_last(setup: Setup, rank: int) -> MinibatchPacks:
    """The packs of a rank without the last document of the first, with the plan of all."""
    (first, *others) = DEALS[setup.deal][rank]
    entries = MinibatchPacks([first[:-1], *others], plan=Plan.by_hand(DEALS[setup.deal]))
    return pack_collate(PackedDataset(samples(setup)).__getitems__(entries))


def fails_once(rank: int, world: int, fault: str, setup: Setup, victim: int) -> str:
    """What was raised when the first pack of `victim` went wrong."""
    model, start_s = sharded(setup, rank), time.monotonic()
    packs = _without_last(setup, rank) if (fault, rank) == ("left out", victim) else packs_of(setup, rank)
    try:
        with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
            for number, pack in enumerate(packs):
                loss_of: Callable = summed_loss
                if rank == victim and number == 0:
                    if fault == "skipped":
                        continue
                    loss_of = {"constant": _constant, "raised": raises_in_forward}.get(fault, summed_loss)
                loss = loss_of(model, pack) / mb.tokens
                loss.backward(retain_graph=fault == "twice")
                if (fault, rank, number) == ("twice", victim, 0):
                    loss.backward()
        said = "nothing"
    except MinibatchFailed as error:
        said = str(error)
    assert time.monotonic() - start_s < LONG_S / 2
    right_after(model, setup, rank)
    return said


TREE, WAVES = Setup(deal="cut tree", prefix=8), Setup(deal="tree waves", prefix=8)
FAULTS = [
    ("raised", SETUP, "rank 1: OutOfMemoryError: no memory for 3 GiB"),
    ("constant", SETUP, "rank 1: RuntimeError: tokens 8..19 of sample 0 had no backward, and other ranks wait for it"),
    (
        "skipped",
        replace(SETUP, backend="cpu-interpreter"),
        "rank 1: RuntimeError: tokens 8..19 of sample 0 were not computed, and other ranks need them",
    ),
    ("constant", TREE, "rank 1: RuntimeError: tokens 5..40 of sample 0 had no backward, and other ranks wait for it"),
    (
        "left out",
        TREE,
        "rank 1: RuntimeError: tokens 7..19 of sample 2 and tokens 5..40 of sample 0 are not in the packs that",
    ),
    (
        "twice",
        TREE,
        "rank 1: RuntimeError: tokens 5..40 of sample 0 had a backward already, and other ranks have taken",
    ),
    ("skipped", WAVES, "rank 1: RuntimeError: tokens 5..40 of sample 0 were not computed, and other ranks need them"),
]


def test_every_rank_hears_the_cause_alone() -> None:
    found = ranks.run_all(3, *((fails_once, fault, setup, 1) for fault, setup, _ in FAULTS))
    for (*_, words), of_ranks in zip(FAULTS, found, strict=True):
        assert_cause_alone(of_ranks, words)


def assert_cause_alone(of_ranks: list[str], words: str) -> None:
    for said in of_ranks:
        assert words in said
        assert said.count("rank ") - said.count("ranks") - said.count("other rank") <= 2, said
        assert "PeerFailed" not in said


def _wrong_calls(rank: int, world: int) -> None:
    plan = SplitPlan.of(DEALS["two"])
    packs = packs_of(Setup(), rank)

    def one(split: Any = None, pack: dict | None = None) -> None:
        with minibatch(model, tokens=1, split=split):
            if pack is not None:
                summed_loss(model, pack).backward()

    def refused(words: str, call: Callable) -> None:
        assert words in (said := caught(call)), said

    model = fully_shard(build(Setup(), replaced=True))
    refused(
        "RuntimeError: this minibatch was given a split: call enable_split(model, tokens=…) after fully_shard",
        lambda: one(split=plan),
    )
    refused(
        "If other packs have them, call enable_split(model, tokens=…) after fully_shard", lambda: one(pack=packs[0])
    )
    refused(
        "ValueError: tokens is 0; give the tokens per rank that others may read, 1 or more",
        lambda: enable_split(model, tokens=0),
    )
    refused("ValueError: SampleSums are of split samples: call enable_split", lambda: SampleSums(model, samples=4))
    refused("RanksDiffer: enable_split: tokens is ", lambda: enable_split(model, tokens=20 + rank))
    enable_split(model, tokens=np.int64(30))
    refused("ValueError: enable_split was called on this model before", lambda: enable_split(model, tokens=30))
    refused(
        "ValueError: samples is 0; give more than any number of a sample, 1 or more",
        lambda: SampleSums(model, samples=0),
    )
    others = np.int64(10_000 * (1 + rank))
    refused("RanksDiffer: SampleSums: samples is ", lambda: SampleSums(model, samples=others))
    refused(
        "If other packs have them, give the plan, minibatch(model, tokens=…, split=packs.split)",
        lambda: one(pack=packs[0]),
    )
    refused("are not this rank's in the minibatch's plan", lambda: one(split=plan, pack=packs_of(Setup(), 1 - rank)[0]))
    refused("TypeError: split is a list; give the packs' plan, packs.split", lambda: one(split=[1]))
    refused(
        "the plan is of 3 ranks; make it for the 2 ranks of this model",
        lambda: one(split=SplitPlan.of(DEALS["zigzag"])),
    )
    many = SplitPlan.of([[[Segment(0, 0, 40)]], [[Segment(0, 40, 41)]]])
    refused(
        "lets others read 40 tokens of rank 0, and there is room for 30: give enable_split(", lambda: one(split=many)
    )
    other = SplitPlan.of([[[Segment(0, 0, 20)]], [[Segment(0, 20, 41)]]])
    refused("RanksDiffer: the ranks split sequences by 2 different plans", lambda: one(split=plan if rank else other))
    refused("(none on rank 0, ", lambda: one(split=plan if rank else None))
    # And after all of it a minibatch works.
    _, found = step_on(model, Setup(), rank)
    require_plain(found, Setup())


def test_wrong_calls_are_told() -> None:
    ranks.run(_wrong_calls, 2)


def _with_other_tokens(rank: int, world: int) -> list[str]:
    """What a minibatch of a prompt's six completions says, if rank 1 has another token in it, or in a completion."""
    model, said = sharded(Setup(), rank, tokens=99), []
    for place in (20, 65):
        prompt, answers = [4, 5] * 30, [[10 + n] * 9 for n in range(6)]
        rows = [prompt + answer for answer in answers]
        for row in rows if rank else ():
            row[place] = 9
        own = [{"input_ids": row, "labels": [-100] * 60 + row[60:]} for row in rows]
        how = {"ranks": world, "token_cap": 400, "cost": CostModel(quadratic=0.0, linear=1.0), "tokens": 99}
        made = shared([69] * 6, find_relatives(own), **how)
        assert sum(made.split.tokens) > 0, "the prompt is computed once"
        packs = pack_collate(PackedDataset(own).__getitems__(made.packs(rank)))

        def step(packs: MinibatchPacks = packs) -> None:
            with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
                for pack in packs:
                    (summed_loss(model, pack) / mb.tokens).backward()

        said.append(caught(step))
    return said


def test_tokens_that_are_shared_must_be_the_same_on_all_ranks() -> None:
    for in_prompt, in_completion in ranks.run(_with_other_tokens, 2):
        assert in_prompt.startswith("RanksDiffer: the ranks split sequences by 2 different plans")
        assert in_completion == "nothing was raised"
