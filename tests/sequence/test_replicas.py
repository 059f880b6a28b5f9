"""Sequences split within each of several replicas: as plain torch unsplit, and what goes wrong on one replica
is known on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from odc_triton import minibatch, split_forward
from odc_triton.balance import pack_collate
from odc_triton.hf import summed_loss
from odc_triton.plan.segments import SplitPlan
from tests.sequence.test_exact import assert_same_bits, exact_gradients
from tests.sequence.test_failures import assert_cause_alone, fails_once, right_after
from tests.sequence.test_parity import assert_alike
from tests.sequence.test_trees import assert_alike as assert_as_dense
from tests.support import ranks
from tests.support.refusals import caught
from tests.support.splitting import DEALS, Dealt, P, Setup, build, packs_of, plain, run, samples, sharded, step_on
from tests.support.tree_cells import Cell, dense, joined, on_ranks

SETUP = Setup(deal="2x2", replicas=2)
# Replica 0 has no segments.
AWAY: Dealt = [[[0, 1]], [[3]], [[P(2, 0, 10)]], [[P(2, 10, 30)]]]
OTHER: Dealt = [*DEALS["2x2"][:2], [[P(2, 0, 12)], [1]], [[P(2, 12, 30)]]]  # replica 0 as in DEALS
# Three additions to what rank 0 has, one of them its own: their order changes bits.
IN_ORDER: Dealt = [
    [[P(0, 0, 10), P(0, 20, 30)]],
    [[P(0, 10, 20), P(0, 30, 41), 3]],
    [[P(2, 0, 11)], [1]],
    [[P(2, 11, 30)]],
]


def _wrong_plans(rank: int, world: int) -> dict[str, str]:
    model, said = sharded(SETUP, rank), {}
    plan, other = (SplitPlan.of(deal, replicas=2) for deal in (DEALS["2x2"], OTHER))
    undivided = SplitPlan.of(DEALS["2x2"])

    def trains(split: SplitPlan) -> None:
        with minibatch(model, tokens=1, split=split):
            raise AssertionError("it is open")

    def evaluates(split: SplitPlan) -> None:
        with torch.no_grad(), split_forward(model, split):
            raise AssertionError("it is open")

    for name, enter in (("train", trains), ("evaluate", evaluates)):
        said[f"{name}, for one replica"] = caught(lambda enter=enter: enter(undivided))
        said[f"{name}, for one replica on rank 2"] = caught(lambda enter=enter: enter(undivided if rank == 2 else plan))
        said[f"{name}, another on replica 1"] = caught(lambda enter=enter: enter(plan if rank < 2 else other))
    right_after(model, SETUP, rank)
    return said


def _evaluates(rank: int, world: int) -> tuple[str, list[float], dict[str, torch.Tensor]]:
    """What an evaluation said that failed on rank 2; this rank's losses in others; gradients of a step with `AWAY`."""
    model, losses = sharded(SETUP, rank), []

    def fails() -> None:
        with torch.no_grad(), split_forward(model, (packs := packs_of(SETUP, rank)).split):
            for pack in packs:
                if rank == 2:
                    raise ValueError("no luck")
                summed_loss(model, pack)

    said = caught(fails)
    for deal in (DEALS["2x2"], AWAY):
        packs = packs_of(SETUP, rank, deal=deal)
        with torch.no_grad(), split_forward(model, packs.split):
            losses.append(sum(summed_loss(model, pack).item() for pack in packs))
    return said, losses, step_on(model, SETUP, rank, deal=AWAY)[1]


TREES = Cell(shape="three levels", deal="on two replicas", replicas=2)
CALLS: dict[str, tuple[Callable | Any, ...]] = {
    "parity": (run, replace(SETUP, steps=2)),
    "raised": (fails_once, "raised", SETUP, 2),
    "trees": (on_ranks, TREES),
    "wrong plans": (_wrong_plans,),
    "evaluates": (_evaluates,),
    **{f"exact, {late} late": (partial(exact_gradients, late=late), SETUP, IN_ORDER) for late in (0, 1)},
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each of `CALLS` returned, by rank: on two replicas of two ranks, all in one launch."""
    return dict(zip(CALLS, ranks.run_all(4, *CALLS.values()), strict=True))


def test_as_whole_samples(found: dict[str, list[Any]]) -> None:
    assert_alike(replace(SETUP, steps=2), found["parity"])


def test_trees_as_whole_samples_each_on_one_replica(found: dict[str, list[Any]]) -> None:
    assert_as_dense(TREES, joined(found["trees"]), dense(TREES))
    astray = [[[P(0, 0, 9)]], [[P(1, 5, 9, 0)]], [[P(2, 6, 9, 1)]], []]
    words = r"sample \d has segments on ranks of replicas \[0, 1\].*: keep a sample, and all that branch from it"
    with pytest.raises(ValueError, match=words):
        SplitPlan.of(astray, replicas=2)


def test_all_replicas_hear_the_cause_alone(found: dict[str, list[Any]]) -> None:
    assert_cause_alone(found["raised"], "rank 2: OutOfMemoryError: no memory for 3 GiB")


def test_a_plan_for_other_replicas_is_refused_and_plans_differ_by_any_replica(found: dict[str, list[Any]]) -> None:
    refusal = (
        "ValueError: the plan is for replicas=1; the model has 2: give that number to MinibatchSampler(replicas=…)"
    )
    for said in found["wrong plans"]:
        for name in ("train", "evaluate"):
            assert refusal in said[f"{name}, for one replica"]
            assert refusal in said[f"{name}, for one replica on rank 2"]
            assert said[f"{name}, another on replica 1"].startswith("RanksDiffer: the ranks split sequences by 2 diff")
        assert said["train, for one replica on rank 2"].startswith("MinibatchFailed: ")
        assert f"(rank 2: {refusal}" in said["train, for one replica on rank 2"]


def test_evaluation_and_a_replica_without_segments(found: dict[str, list[Any]]) -> None:
    model = build(SETUP, replaced=False)
    with torch.no_grad():
        want = sum(summed_loss(model, pack).item() for pack in pack_collate([[each] for each in samples(SETUP)]))
    for at in range(2):
        assert sum(losses[at] for _, losses, _ in found["evaluates"]) == pytest.approx(want, rel=1e-5)
    *without, failed, waited = (said for said, _, _ in found["evaluates"])
    assert (without, failed) == (["nothing was raised"] * 2, "ValueError: no luck")
    awaited = "rank 3 waited for keys and values of tokens 0..10 of sample 2 in layer 0"
    assert waited == f"PeerFailed: {awaited}, and rank 2 failed"
    for *_, got in found["evaluates"]:
        for name, gradient in plain(Setup())[1].items():
            assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_exact_whoever_is_late(found: dict[str, list[Any]]) -> None:
    assert_same_bits(found["exact, 0 late"], found["exact, 1 late"])
