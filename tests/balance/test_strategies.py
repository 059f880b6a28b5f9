"""Packs and the four ways to assign samples: what each promises, for any lengths."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc_triton.balance import BALANCES, CostModel, assign, assign_one, best_fit_decreasing, pack, queue_packs

COST = CostModel.paper_7b()
CAP = 1000
lengths_lists = st.lists(st.integers(1, CAP), min_size=1, max_size=32)


def costs_of(packs, lengths) -> list[float]:
    return [sum(COST.sequence(lengths[i]) for i in members) for members in packs]


def long_tailed(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(65536, max(1, int(rng.lognormvariate(9.2, 1.0)))) for _ in range(count)]


def check_packs(packs, lengths, cap) -> None:
    assert sorted(i for members in packs for i in members) == list(range(len(lengths)))
    for members in packs:
        assert 0 < sum(lengths[i] for i in members) <= cap


@given(lengths_lists, st.data())
def test_packs_hold_every_document_once_under_the_cap(lengths, data):
    fewest = best_fit_decreasing(lengths, token_cap=CAP)
    check_packs(fewest, lengths, CAP)
    # No two of the packs fit into one, or best fit would have put them there.
    fills = sorted(sum(lengths[i] for i in members) for members in fewest)
    assert len(fills) < 2 or fills[0] + fills[1] > CAP
    count = data.draw(st.integers(len(fewest), len(lengths)))
    packs = pack(lengths, token_cap=CAP, cost=COST, count=count)
    check_packs(packs, lengths, CAP)
    assert len(packs) == count
    costs = costs_of(packs, lengths)
    assert costs == sorted(costs, reverse=True)
    assert len(pack(lengths, token_cap=CAP, cost=COST)) == len(fewest)


def test_packs_are_few_and_even():
    assert len(best_fit_decreasing([6, 5, 4, 3, 2], token_cap=10)) == 2
    for seed in range(5):
        lengths = [n % 500 + 1 for n in long_tailed(40, seed)]
        packs = pack(lengths, token_cap=2000, cost=COST)
        assert len(packs) <= -(-sum(lengths) // 2000) + 1
        assert max(costs_of(packs, lengths)) <= 1.02 * min(costs_of(packs, lengths))


def test_local_keeps_each_ranks_own_run_one_sample_a_microbatch():
    dealt = assign([3, 9, 5, 1, 2, 8], ranks=2, token_cap=9, balance="local")
    assert dealt == [[[1], [2], [0]], [[5], [4], [3]]]
    assert [len(packs) for packs in assign([1] * 5, ranks=2, token_cap=9, balance="local")] == [2, 3]


def test_mini_may_differ_in_packs_and_leave_ranks_empty():
    # One long document costs as much as many short ones, which need two packs.
    cost = CostModel(quadratic=1.0, linear=0.0)
    dealt = assign([100] + [25] * 16, ranks=2, token_cap=200, balance="mini", cost=cost)
    assert sorted(len(packs) for packs in dealt) == [1, 2]
    assert sorted(map(len, assign([5], ranks=3, token_cap=9, balance="mini"))) == [0, 0, 1]


def test_global_groups_hold_packs_that_are_neighbours_by_cost():
    lengths = long_tailed(64, seed=2)
    dealt = assign(lengths, ranks=4, token_cap=65536, balance="global", cost=COST)
    costs = [costs_of(packs, lengths) for packs in dealt]
    rows = list(zip(*costs, strict=True))
    assert len(rows) > 1
    # Every second group is dealt in reverse, so that no rank gets the dearest of each.
    assert assign([8, 7, 6, 5], ranks=2, token_cap=8, balance="global") == [[[0], [3]], [[1], [2]]]
    for above, below in itertools.pairwise(rows):
        assert min(above) >= max(below)


def test_too_few_samples_for_equal_counts_are_refused_with_the_remedy():
    # Three samples that cannot share a pack: one rank would need two microbatches, the other has one.
    with pytest.raises(ValueError, match=r"leave a rank with 1, but every rank needs 2 .*'mini'"):
        assign([9, 9, 9], ranks=2, token_cap=10, balance="micro")
    with pytest.raises(ValueError, match=r"3 samples cannot make 4 packs \(3 under .*'mini'"):
        assign([9, 9, 9], ranks=2, token_cap=10, balance="global")
    with pytest.raises(ValueError, match="leave a rank with 0"):
        assign([9], ranks=2, token_cap=10, balance="micro")
    assert sorted(map(len, assign([9, 9, 9], ranks=2, token_cap=10, balance="mini"))) == [1, 2]


@pytest.mark.parametrize("balance", [*BALANCES, "queue"])
@given(st.data())
def test_every_dealing_holds_every_sample_once_under_the_cap(balance, data):
    """An image may cost as much as two long samples: whoever has it gets less of the rest, and it comes first."""
    ranks = data.draw(st.integers(1, 6))
    lengths = data.draw(lengths_lists)
    lengths += [1] * (-len(lengths) % ranks)  # a multiple of the ranks works under every balance
    images = st.lists(st.floats(0, 2 * COST.sequence(CAP)), min_size=len(lengths), max_size=len(lengths))
    extra = data.draw(st.none() | images)
    how = {"ranks": ranks, "token_cap": CAP, "cost": COST, "extra": extra}
    costs = COST.samples(lengths, extra)

    def of(members: list[int]) -> float:
        return sum(costs[i] for i in members)

    if balance == "queue":
        packs = queue_packs(lengths, **how)
        check_packs(packs, lengths, CAP)
        assert all(len(each) == 1 or of(each) <= sum(costs) / ranks / 16 * (1 + 1e-9) for each in packs)
        assert of(packs[0]) == pytest.approx(max(map(of, packs)))
        return
    dealt = assign(lengths, **how, balance=balance)
    assert len(dealt) == ranks
    check_packs([each for packs in dealt for each in packs], lengths, CAP)
    for rank, packs in enumerate(dealt):
        assert [*map(of, packs)] == sorted(map(of, packs), reverse=True)
        assert assign_one(lengths, rank=rank, **how, balance=balance) == packs
    if balance != "mini":
        assert len({len(packs) for packs in dealt}) == 1
        if balance != "global":
            assert {sum(map(len, packs)) for packs in dealt} == {len(lengths) // ranks}
        return
    loads = [sum(map(of, packs)) for packs in dealt]
    assert max(loads) <= max(sum(loads) / ranks + max(costs), max(costs)) + 1e-9
    heavy = max(
        range(ranks), key=loads.__getitem__
    )  # no single move from it makes it lighter by more than the tolerance
    own = [i for members in dealt[heavy] for i in members]
    assert all(max(loads[heavy] - costs[i], min(loads) + costs[i]) >= loads[heavy] * 0.998 for i in own)


@pytest.mark.parametrize("call", [queue_packs, *(partial(assign, balance=each) for each in BALANCES)])
def test_refused(call):
    for change, message in (
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [3, 0]}, r"lengths\[1\] is 0"),
        ({"lengths": [3, 11]}, r"lengths\[1\] is 11 tokens, over the token_cap of 10: raise the cap"),
        ({"ranks": 0}, "ranks is 0"),
        ({"token_cap": 0}, "token_cap is 0"),
        ({"token_cap": float("nan")}, "token_cap is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**{"lengths": [3, 4], "ranks": 2, "token_cap": 10, **change})
    with pytest.raises(ValueError, match="balance is 'best': choose one of mini, micro, global, local"):
        assign([3, 4], ranks=2, token_cap=10, balance="best")
    for count in (1, 5):
        with pytest.raises(ValueError, match=rf"count is {count}: 4 samples .* make from 2 to 4"):
            pack([5, 5, 5, 5], token_cap=10, cost=COST, count=count)
