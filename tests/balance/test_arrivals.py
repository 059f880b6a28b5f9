"""Completions assigned as they come: packs keep the cap and the share of what is left, and each is given once."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.plan.arrivals import _SMALLEST, Arrivals
from odc_triton.plan.cost import CostModel

COST = CostModel(quadratic=0.01, linear=1.0)
Group = tuple[int, list[int]]  # shared tokens, and those of each completion


def arrivals(ranks: int, left: int, cap: int = 100, *, keeps: bool = False) -> Arrivals:
    return Arrivals(ranks=ranks, left=left, token_cap=cap, cost=COST, keeps=keeps)


def numbered(groups: list[Group]) -> Iterator[tuple[dict[int, int], int]]:
    """The arguments of `came`."""
    count = itertools.count()
    for shared, lengths in groups:
        yield {next(count): each for each in lengths}, shared


def drained(it: Arrivals, groups: list[Group]) -> list[list[int]]:
    """All packs, as ranks are free in turn after all groups have come."""
    for each in numbered(groups):
        it.came(*each)
    packs: list[list[int]] = []
    while not it.is_over:
        it.is_free(rank := len(packs) % it.ranks)
        packs.append(it.packs[rank][-1])
    return packs


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    shared = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    return [(each, [each + more for more in draw(st.lists(st.integers(1, 60), max_size=5))]) for each in shared]


@settings(max_examples=60)
@given(groups(), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_each_is_given_once(groups: list[Group], ranks: int, keeps: bool, chance: random.Random) -> None:
    """In any order in which groups come and ranks are free. A rank that is free waits only if there is nothing."""
    it, to_come, busy = arrivals(ranks, len(groups), keeps=keeps), [*numbered(groups)], [*range(ranks)]
    given_to, shared = [0] * ranks, {number: own for lengths, own in to_come for number in lengths}
    lengths = {number: each for group, _ in to_come for number, each in group.items()}
    families = {number: place for place, (group, _) in enumerate(to_come) for number in group}
    while to_come or (busy and not it.is_over):
        comes = to_come and (not busy or chance.random() < 0.4)
        it.came(*to_come.pop()) if comes else it.is_free(busy.pop(chance.randrange(len(busy))))
        for rank, packs in enumerate(it.packs):
            if len(packs) > given_to[rank]:
                given_to[rank] += 1
                assert len(packs) == given_to[rank]
                busy.append(rank)
        assert not (it._pool and len(busy) < ranks)
    packs = [pack for packs in it.packs for pack in packs]
    assert sorted(itertools.chain(*packs, it.rest)) == sorted(lengths)
    assert keeps or not it.rest
    for pack in packs:
        first = {families[number]: number for number in reversed(pack)}
        tokens = sum(lengths[number] - shared[number] * (first[families[number]] != number) for number in pack)
        assert len(pack) == 1 or 0 < tokens <= 100  # shared tokens count once


def test_what_no_pack_holds_is_left_to_the_end() -> None:
    """Where it can be cut, with the rest of its group, whatever comes after it."""
    it = arrivals(2, 3, keeps=True)
    it.is_free(0)
    for each in numbered([(20, [30, 101]), (20, [100, 90]), (20, [40])]):
        it.came(*each)
    given_to = [number for packs in it.packs for pack in packs for number in pack]
    assert set(it.rest) >= {0, 1}
    assert sorted([*given_to, *it.rest]) == [*range(5)]
    assert it.rest[1] == 101


def test_the_costliest_first_and_a_long_one_alone() -> None:
    packs = drained(arrivals(1, 4), [(0, [30, 20]), (0, [120]), (20, [60, 50]), (0, [5])])
    assert packs == [[2], [3, 4, 5], [0, 1]]  # 60 and 30 more tokens, then 5


def test_shares_of_what_is_left() -> None:
    """Of 64 completions alike two ranks take a quarter, then a quarter of the rest; one takes all that fits."""
    one, two = ([len(pack) for pack in drained(arrivals(ranks, 64, 320), [(0, [10])] * 64)] for ranks in (1, 2))
    assert one == [32, 32]
    assert two[:3] == [16, 12, 9]
    assert two == sorted(two, reverse=True)


def test_groups_to_come_count() -> None:
    it = arrivals(2, 4)
    it.is_free(0)
    it.came({})
    it.came(dict.fromkeys(range(8), 10))
    assert [*it.packs[0]] == [[0, 1, 2, 3]]  # a quarter of these 8, and of 4 in each of two groups


@pytest.mark.parametrize("at_once", [True, False])
def test_ranks_end_together(at_once: bool) -> None:
    """A rank is never idle while something is left, and a pack is at most half of an even share of that. So the last
    ends at most one completion, or the least pack, after an even share; counted from when the last group came.
    """
    chance = random.Random(0)
    for _ in range(100):
        ranks, count = chance.randint(2, 6), chance.randint(2, 30)
        them = [(0, [chance.randint(20, 40) for _ in range(4)]) for _ in range(count)]
        cost = {number: COST.sequence(each) for lengths, _ in numbered(them) for number, each in lengths.items()}
        it, last_s = arrivals(ranks, count, 320), 0.0
        events: list[tuple[float, int, int]] = [(0.0, 1, rank) for rank in range(ranks)]
        events += [(0.0 if at_once else chance.uniform(0, sum(cost.values()) / ranks), 0, n) for n in range(count)]
        came_s, done = max(time_s for time_s, is_free, _ in events if not is_free), [0] * ranks
        heapq.heapify(events)
        while events:
            now_s, is_free, which = heapq.heappop(events)
            it.is_free(which) if is_free else it.came(*[*numbered(them)][which])
            for rank, packs in enumerate(it.packs):
                if len(packs) > done[rank]:
                    done[rank] += 1
                    last_s = max(last_s, end_s := now_s + sum(cost[number] for number in packs[-1]))
                    heapq.heappush(events, (end_s, 1, rank))
        largest = max(*cost.values(), COST.sequence(320 // _SMALLEST))
        assert last_s <= came_s + sum(cost.values()) / ranks + largest


def test_a_group_that_shares_is_cut_late() -> None:
    """Whole while as many groups as ranks are left; then in packs of at least four times what it computes again."""
    early = drained(arrivals(2, 3, 1000), [(40, [70] * 4), (40, [69] * 4), (40, [50] * 4)])
    assert early[0] == [0, 1, 2, 3]
    assert [len(pack) for pack in early[1:]] == [4, 4]
    late = drained(arrivals(4, 2, 100), [(10, [20] * 12), (10, [19] * 12)])
    assert [len(pack) for pack in late] == [2] * 12  # 24 and 13, of at least 44


def test_no_pack_has_parts_of_two_groups_that_share() -> None:
    packs = drained(arrivals(2, 10, 1000), [(10, [20 + each] * 5) for each in range(10)])
    assert len(packs[0]) == 10  # a quarter of all would be two groups and a half
    for pack in packs:
        groups = {number // 5 for number in pack}
        assert len(groups) == 1 or all(sum(number // 5 == of for number in pack) == 5 for of in groups)


@pytest.mark.parametrize(("completions", "shared", "is_rest"), [(2, 5, True), (40, 5, False), (40, 0, True)])
def test_what_is_left_is_the_rest_only_if_packs_are_coarse(completions: int, shared: int, is_rest: bool) -> None:
    it = arrivals(4, 1, 1000, keeps=True)
    it.came(dict.fromkeys(range(completions), 20), shared)
    assert bool(it.rest) == is_rest
    assert it.is_over == is_rest
