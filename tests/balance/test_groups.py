"""Groups of samples, such as pairs: each is in one pack, or in segments of one wave over the ranks of a replica."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odc_triton.balance import CostModel, Plan
from odc_triton.plan.entries import Entry, Segment, number_of
from odc_triton.plan.line import count_tokens
from odc_triton.plan.planner import SHARED, make_plan
from odc_triton.plan.relatives import find_relatives
from odc_triton.plan.samples import Limits, Samples
from tests.balance.test_shared import LEAST, SAMPLES, check_tokens, sample

COST = CostModel(quadratic=0.01, linear=1.0, microbatch=2.0)


def planned(lengths: list[int], groups: list[int | None], limits: Limits, **columns: Any) -> Plan:
    return make_plan(Samples.of(lengths, COST, groups=groups, **columns), limits)


def check_groups(plan: Plan, groups: list[int | None], limits: Limits) -> None:
    """Each group is in one pack, or all of it in the plan, in one wave of one replica; packs are within the cap."""
    homes: dict[int, dict[Entry, tuple[int, int]]] = {}
    for rank, packs in enumerate(plan.ready):
        for number, pack in enumerate(packs):
            assert count_tokens(pack, plan.samples.tokens) <= limits.token_cap
            for entry in pack:
                homes.setdefault(groups[number_of(entry)], {})[entry] = rank, number
    for group in homes.keys() - {None}:
        if len({*homes[group].values()}) > 1:
            parts = [plan.split.find(entry) for entry in homes[group]]
            assert None not in parts, "a rank does not know of the others"
            assert len({each.wave for each in parts}) == len({each.rank // limits.shards for each in parts}) == 1
    assert plan.split is None or max(plan.split.tokens) <= limits.readable


@settings(max_examples=60)
@given(SAMPLES, st.integers(1, 4), st.integers(8, 40), st.integers(0, 20), st.booleans(), st.randoms())
@example([sample([0] * 6, [1] * 5), sample([0] * 6, [0] * 5)] * 3, 2, 12, 2, True, None)
@example([sample([0], [1] * 8), sample([1], [0] * 8)] * 2, 4, 10, 1, False, None)
def test_each_group_is_together(
    samples: list[dict], ranks: int, token_cap: int, tokens: int, shares: bool, numbers: Any
) -> None:
    groups = [at // 2 if numbers is None else numbers.choice([-3, 0, 7, 10**12, None]) for at in range(len(samples))]
    limits = Limits(ranks=ranks, token_cap=token_cap, split_tokens=tokens, replicas=2 if ranks == 4 else 1)
    lengths = [len(each["input_ids"]) for each in samples]
    with (
        mock.patch("odc_triton.plan.relatives.LEAST_SHARED", LEAST),
        mock.patch("odc_triton.plan.shared.LEAST_TOKENS", 2),
    ):
        relatives = find_relatives(samples) if shares else None
        try:
            plan = planned(lengths, groups, limits, prefixes=relatives)
        except ValueError:
            of_group = [[n for n, of in zip(lengths, groups, strict=True) if of == each] for each in {*groups} - {None}]
            assert max([*map(sum, of_group), *lengths]) > token_cap
            return
    assert len(plan.ready) == ranks
    check_groups(plan, groups, limits)
    check_tokens(samples, [0] * len(samples), [each for own in plan.ready for pack in own for each in pack])


# Lengths, their groups, tokens that others may read, the packs of two ranks with a cap of 1,000.
ASSIGNED = [
    # LB-Mini would put the samples of each group on both ranks.
    ([600, 300, 550, 350], [1, 1, 2, 2], 0, [[[0, 1]], [[2, 3]]]),
    ([600, 300, 500], [1, 1, None], 0, [[[0, 1]], [[2]]]),
    # Cut between its samples: nothing is read, and both ranks know of the group.
    ([700, 700], [5, 5], 1, [[[Segment(0, 0, 700)]], [[Segment(1, 0, 700)]]]),
    # So it is where others may read too little for an even cut.
    ([900, 600], [5, 5], 1, [[[Segment(0, 0, 900)]], [[Segment(1, 0, 600)]]]),
    # The sample that is not cut is a segment too.
    ([400, 800], [5, 5], 900, [[[Segment(0, 0, 400), Segment(1, 0, 200)]], [[Segment(1, 200, 800)]]]),
    # With the fourth on their line the three over the cap would have more tokens to read.
    (
        [*[1500, 300] * 3, 100, 100],
        [0, 0, 1, 1, 2, 2, 3, 3],
        2750,
        [
            [*([Segment(at, 0, 900)] for at in (0, 2, 4)), [6, 7]],
            [[Segment(at, 900, 1500), Segment(at + 1, 0, 300)] for at in (0, 2, 4)],
        ],
    ),
]


@pytest.mark.parametrize(("lengths", "groups", "tokens", "packs"), ASSIGNED)
def test_assigned(lengths: list[int], groups: list[int | None], tokens: int, packs: list) -> None:
    cost = CostModel(quadratic=0.0, linear=1.0)
    limits = Limits(ranks=2, token_cap=1000, split_tokens=tokens)
    plan = make_plan(Samples.of(lengths, cost, groups=groups), limits)
    assert plan.ready == packs
    assert plan.samples.some([1, 0]).groups == groups[1::-1]
    check_groups(plan, groups, limits)
    named = make_plan(Samples.of(lengths, cost, groups=groups, names=range(50, 50 + len(lengths))), limits, SHARED)
    entries = [each for own in named.ready for pack in own for each in pack]
    assert {*map(number_of, entries)} == {*range(50, 50 + len(lengths))}
    assert (named.split is None) == (plan.split is None)


def test_a_pair_whose_prompt_nobody_may_read_shares_nothing() -> None:
    samples = [sample([7] * 600, [answer] * 300) for answer in (1, 2)]
    for tokens, computed in ((700, 1201), (300, 1800)):
        limits = Limits(ranks=2, token_cap=1000, split_tokens=tokens)
        plan = planned([900, 900], [0, 0], limits, prefixes=find_relatives(samples))
        assert sum(len(each) for own in plan.ready for pack in own for each in pack) == computed
        check_groups(plan, [0, 0], limits)


def test_groups_that_can_not_be_kept_are_refused() -> None:
    alone, limits = Limits(ranks=2, token_cap=1000), Limits(ranks=2, token_cap=1000, split_tokens=500)
    for lengths, groups, within, words in (
        ([600, 600], [7, 7], alone, "group 7, of samples 0, 1, has 1200 tokens, over the token_cap of 1000"),
        ([600, 600], [7, 7], Limits(ranks=1, token_cap=1000, split_tokens=9), "raise the cap or the tokens to read"),
        ([900, 900, 900], [7, 7, 7], limits, "has 2700 tokens, over the token_cap of 1000"),
        ([900, 1900], [7, None], alone, "sample 1 has 1900 tokens"),
        ([600, 600], [7], limits, "groups has 1 numbers for 2 samples"),
        ([600, 600], [7, 1.5], limits, "groups must be whole numbers, or None: 'float'"),
    ):
        with pytest.raises(ValueError, match=words):
            planned(lengths, groups, within)
    for balance in ("queue", "micro", "split"):
        with pytest.raises(ValueError, match=f"balance '{balance}' can't keep groups of samples together: use 'mini'"):
            make_plan(Samples.of([6, 6], COST, groups=[0, 0]), Limits(ranks=2, token_cap=10), balance)
    with pytest.raises(ValueError, match=r"sample 1 is whole, its group in several packs: give Segment\(1, 0, …\)"):
        Plan.by_hand([[[Segment(0, 0, 5)]], [[1]]], groups={0: 4, 1: 4})
