"""Cutting the longest sequences over ranks: every token once, within the limits, evenly, and no circle of waits."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.balance import CostModel, MinibatchSampler, PackedDataset, assign, count_target_tokens, pack_collate
from odc_triton.balance.line import Strip, cut_line
from odc_triton.balance.pieces import Entry, MinibatchPacks, Piece, SplitPlan
from odc_triton.balance.queue import OwnCounter
from odc_triton.balance.split import assign_split, readable_tokens

COST = CostModel.paper_7b()
COSTS = [COST, CostModel(quadratic=1.0, linear=0.0), CostModel(quadratic=0.0, linear=1.0)]
IGNORED = -100


def price(entry: Entry, lengths: list[int], cost: CostModel) -> float:
    """A piece costs what its document costs up to its end, less what it costs up to its beginning."""
    if isinstance(entry, Piece):
        return cost.sequence(entry.stop) - cost.sequence(entry.start)
    return cost.sequence(lengths[entry])


def tokens_of(pack: list[Entry], lengths: list[int]) -> int:
    return sum(each.stop - each.start if isinstance(each, Piece) else lengths[each] for each in pack)


def wait_graph(dealt: list[list[list[Entry]]], layers: int = 2) -> TopologicalSorter:
    """What each rank does, in its order, and what it waits for: see [Note: waves] in balance/pieces.py."""
    graph: TopologicalSorter = TopologicalSorter()
    place = {piece: (rank, at) for rank, packs in enumerate(dealt) for at, pack in enumerate(packs) for piece in pack}
    pieces = [each for each in place if isinstance(each, Piece)]
    for rank, packs in enumerate(dealt):
        before = None
        for at, pack in enumerate(packs):
            own = [each for each in pack if isinstance(each, Piece)]
            forward = [(layer, what) for layer in range(layers) for what in ("publish", "attend")]
            backward = [(layer, what) for layer in reversed(range(layers)) for what in ("add", "collect")]
            for layer, what in [*forward, *backward]:
                step = rank, at, layer, what
                graph.add(step, *([] if before is None else [before]))
                before = step
                for piece in own if what in ("attend", "collect") else []:
                    later = what == "collect"
                    for other in pieces:
                        if other.sample == piece.sample and (other.start > piece.start) == later and other != piece:
                            graph.add(step, (*place[other], layer, "add" if later else "publish"))
    return graph


@st.composite
def minibatches(draw: st.DrawFn) -> dict:
    ranks = draw(st.integers(1, 9))
    token_cap = draw(st.sampled_from([90, 1000, 5000, 70_000]))
    longest = draw(st.sampled_from([token_cap, min(2, ranks) * token_cap, ranks * token_cap]))
    shortest = draw(st.sampled_from([1, longest // 2]))
    lengths = draw(st.lists(st.integers(shortest, longest), min_size=1, max_size=4 * ranks))
    quadratic, linear = draw(st.sampled_from([(COST.quadratic, COST.linear), (1.0, 0.0), (0.0, 1.0)]))
    return {
        "lengths": lengths,
        "ranks": ranks,
        "token_cap": token_cap,
        "tokens": draw(st.sampled_from([0, token_cap // 4, token_cap, 10 * token_cap])),
        "cost": CostModel(quadratic=quadratic, linear=linear, microbatch=draw(st.sampled_from([0.0, linear * 50]))),
    }


def lb_mini_estimate(given: dict) -> float:
    packs = assign(
        given["lengths"], ranks=given["ranks"], token_cap=given["token_cap"], balance="mini", cost=given["cost"]
    )
    return max(math.fsum(given["cost"].pack([given["lengths"][i] for i in pack]) for pack in mine) for mine in packs)


def check(given: dict, dealt: list[list[list[Entry]]], planned: SplitPlan | None) -> None:
    lengths, ranks = given["lengths"], given["ranks"]
    seen: dict[int, list[tuple[int, int]]] = {}
    for packs in dealt:
        for pack in packs:
            assert 0 < tokens_of(pack, lengths) <= given["token_cap"]
            for each in pack:
                if isinstance(each, Piece):
                    seen.setdefault(each.sample, []).append((each.start, each.stop))
                    assert each.stop - each.start >= min(64, given["token_cap"] // 2)
                else:
                    seen.setdefault(each, []).append((0, lengths[each]))
    assert sorted(seen) == list(range(len(lengths)))
    for sample, parts in seen.items():
        parts.sort()
        assert parts[0][0] == 0
        assert parts[-1][1] == lengths[sample]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    read = [0] * ranks
    for rank, packs in enumerate(dealt):
        for each in (each for pack in packs for each in pack if isinstance(each, Piece)):
            read[rank] += (each.stop - each.start) * (each.stop < lengths[each.sample])
    assert max(read) <= given["tokens"]
    plan = SplitPlan.of(dealt)
    assert (plan is None) == (planned is None)
    if plan is not None:
        # Waves that share no rank may be numbered either way.
        assert [replace(each, wave=0) for each in plan.pieces] == [replace(each, wave=0) for each in planned.pieces]
        assert plan.tokens == read
        wait_graph(dealt).prepare()
        for rank in range(ranks):  # rows that others read do not overlap
            own = sorted((each.offset, each.offset + each.read) for each in plan.of_rank(rank))
            assert all(a[1] == b[0] for a, b in itertools.pairwise(own))


@settings(max_examples=500, deadline=None)
@given(minibatches())
def test_every_token_once_within_the_limits(given: dict) -> None:
    try:
        deal = assign_split(**given)
    except ValueError as error:
        assert max(given["lengths"]) > given["token_cap"]
        assert re.search(r"sample \d+ has \d+ tokens, over the token_cap of", str(error))  # noqa: PT017
        assign_split(**given | {"tokens": sum(given["lengths"])})
        return
    check(given, [deal.packs(rank) for rank in range(given["ranks"])], deal.plan)
    assert assign_split(**given) == deal or deal.plan is not None
    if max(given["lengths"]) <= given["token_cap"]:
        assert deal.estimate <= lb_mini_estimate(given) * (1 + 1e-9)


@pytest.mark.parametrize("shortest", [0.05, 1.0])
@pytest.mark.parametrize("cost", COSTS)
def test_readable_tokens_are_enough_for_any_minibatch(cost: CostModel, shortest: float) -> None:
    """`shortest`: of the samples, in caps."""
    chance, were_split = random.Random(0), 0
    for _ in range(20):
        ranks, token_cap = chance.randint(2, 12), chance.choice([90, 1000, 70_000])
        samples = ranks * chance.randint(1, 4)
        longest = chance.choice([2, ranks]) * token_cap
        data = [chance.randint(int(shortest * token_cap) + 1, longest) for _ in range(2 * samples)]
        options = {"ranks": ranks, "token_cap": token_cap, "cost": cost}
        options["tokens"] = readable_tokens(data, samples=samples, **options)
        lengths = chance.sample(data, samples)
        deal = assign_split(lengths, **options)
        check(options | {"lengths": lengths}, [deal.packs(rank) for rank in range(ranks)], deal.plan)
        were_split += deal.plan is not None
    assert were_split > 10


@pytest.mark.parametrize(("length", "ranks"), [(140, 8), (70_000, 8), (70_000, 2)])
@pytest.mark.parametrize("cost", COSTS)
def test_readable_tokens_are_enough_to_cut_one_long_sample(length: int, ranks: int, cost: CostModel) -> None:
    """Of 140 tokens on 8 ranks a part has 18, but no piece has fewer than 64."""
    options = {"ranks": ranks, "token_cap": 70_000, "cost": cost}
    tokens = readable_tokens([length], samples=1, **options)
    assert assign_split([length], tokens=tokens, **options).plan is not None


@settings(max_examples=100, deadline=None)
@given(minibatches(), st.randoms(use_true_random=False))
def test_with_a_queue_every_token_once_in_any_order_of_taking(given: dict, chance: random.Random) -> None:
    ranks, lengths = given["ranks"], given["lengths"]
    options = {name: given[name] for name in ("lengths", "token_cap", "cost")}
    options |= {"samples_per_rank": -(-len(lengths) // ranks), "world": ranks, "balance": "queue"}
    try:
        samplers = [
            MinibatchSampler(rank=rank, counter=counter, split=given["tokens"] or True, **options)
            for counter in [OwnCounter()]
            for rank in range(ranks)
        ]
        queues = [next(iter(each)) for each in samplers]
    except ValueError as error:
        assert given["tokens"] > 0, "its own number is enough"
        assert max(lengths) > given["token_cap"]
        assert re.search(r"sample \d+ has \d+ tokens, over the token_cap of", str(error))  # noqa: PT017
        return
    assert len({each.split and each.split.digest for each in queues}) == 1, "one plan on every rank"
    assert sorted(index for each in queues for index in each.own_part()) == list(range(len(lengths)))
    dealt: list[list[list[Entry]]] = [[] for _ in queues]
    working = list(range(ranks))
    while working:
        rank = chance.choice(working)
        pack = queues[rank].take()
        if pack is None:
            working.remove(rank)
        else:
            dealt[rank].append(pack)
    check(given | {"tokens": samplers[0].split_tokens}, dealt, queues[0].split)
    for rank, packs in enumerate(dealt):
        taken = [queues[rank].packs[place] for place in queues[rank].taken]
        assert packs == [*queues[rank].waves[rank], *taken], "waves first, in their order"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(100, 65536), min_size=1, max_size=9), st.integers(1, 8))
def test_parts_of_a_line_are_even(lengths: list[int], ranks: int) -> None:
    parts = [
        math.fsum(price(each, lengths, COST) for each in part)
        for part in cut_line([Strip(i, 0, length) for i, length in enumerate(lengths)], [1.0] * ranks, COST)
    ]
    level = math.fsum(parts) / ranks
    assert level == pytest.approx(math.fsum(map(COST.sequence, lengths)) / ranks)
    if level >= COST.sequence(6400):
        assert max(parts) <= 1.01 * level


def test_with_one_long_sample_all_ranks_cost_the_same() -> None:
    deal = assign_split([65536], ranks=4, token_cap=65536, tokens=32768, cost=COST)
    pieces = deal.plan.pieces
    assert [each.rank for each in pieces] == [0, 1, 2, 3]
    costs = [price(each.piece, [65536], COST) for each in pieces]
    assert max(costs) / min(costs) < 1.01
    assert deal.estimate == pytest.approx(COST.sequence(65536) / 4, rel=0.01)
    with_launches = CostModel(quadratic=COST.quadratic, linear=COST.linear, microbatch=3.0)
    dear = assign_split([65536], ranks=4, token_cap=65536, tokens=32768, cost=with_launches)
    assert dear.estimate == pytest.approx(COST.sequence(65536) / 4 + 3.0, rel=0.01)
    lengths = [len(each.piece) for each in pieces]
    assert lengths == sorted(lengths, reverse=True), "later tokens attend to more"


def test_longer_than_the_cap() -> None:
    deal = assign_split([3000, 10], ranks=2, token_cap=2000, tokens=1990, cost=COST)
    assert max(tokens_of(pack, [3000, 10]) for rank in range(2) for pack in deal.packs(rank)) <= 2000
    assert deal.plan.lengths == {0: 3000}
    even = assign_split([3999], ranks=2, token_cap=2000, tokens=3000, cost=COST)
    assert [[tokens_of(pack, [3999]) for pack in even.packs(rank)] for rank in range(2)] == [[1999], [2000]]
    costs = [sum(COST.piece(each.start, each.stop, 0) for each in even.packs(rank)[0]) for rank in range(2)]
    assert max(costs) < 1.001 * min(costs)
    with pytest.raises(ValueError, match=r"sample 0 has 3000 tokens, over the token_cap of 2000, .*pieces need 1500"):
        assign_split([3000, 10], ranks=2, token_cap=2000, tokens=100, cost=COST)
    with pytest.raises(
        ValueError, match="over the 4000 of 2 ranks that share memory, each with a token_cap of 2000: raise"
    ):
        assign_split([4001], ranks=2, token_cap=2000, tokens=4000, cost=COST)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"ranks": 0}, "ranks is 0"), ({"tokens": -1}, "tokens is -1"), ({"token_cap": 0}, "token_cap is 0")],
)
def test_refusals(changed: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        assign_split([5], **{"ranks": 1, "tokens": 1, "token_cap": 9, "cost": COST} | changed)


# ------------------------------------------------------------------ plans made by hand

P = Piece
SWAPPED = [[[P(0, 0, 5)], [P(1, 0, 3)]], [[P(1, 3, 4)], [P(0, 5, 6)]]]


@pytest.mark.parametrize(
    ("dealt", "words"),
    [
        (SWAPPED, "ranks compute samples [0, 1] in different orders"),
        ([[[P(0, 0, 5)], [P(0, 5, 6)]]], "rank 0 has pieces of samples [0], which are computed together, in two packs"),
        ([[[P(0, 0, 5)]], [[P(0, 6, 7)]]], "the pieces of sample 0 leave out its tokens 5..5"),
        ([[[P(3, 2, 5)]], [[P(3, 5, 7)]]], "the pieces of sample 3 leave out its tokens 0..1"),
        ([[[P(0, 0, 5)]], [[P(0, 4, 7)]]], "the pieces of sample 0 hold twice its tokens 4..4"),
        ([[[P(0, 0, 5)]], [[P(0, 0, 5)]]], "tokens 0..4 of sample 0 are in two packs"),
        ([[[P(0, 0, 5)]], [[1]]], "tokens 0..4 of sample 0 are its only piece"),
        ([[[P(0, 0, 5)]], [[P(0, 5, 7), 0]]], "sample 0 is in the packs both whole and in pieces"),
        ([[[P(2, 4, 6, 1)]], [[P(1, 3, 7, 0)]]], "tokens 3..6 of sample 1 branch off sample 0, and no piece here"),
        ([[[0]], [[P(1, 3, 7, 0)]]], "give all pieces of sample 0, as Piece(0, 0, …) if it is whole"),
        ([[[P(0, 0, 2)]], [[P(1, 3, 7, 0)]]], "tokens 3..6 of sample 1 branch off sample 0, and no piece here"),
        ([[[P(0, 0, 2), P(0, 3, 9)]], [[P(1, 5, 7, 0)]]], "the pieces of sample 0 leave out its tokens 2..2"),
        ([[[P(0, 0, 9)], [P(1, 5, 7, 0)]], [[P(2, 5, 9, 0)]]], "rank 0 has pieces of samples [0, 1, 2], which are"),
        ([[[P(0, 0, 5), P(1, 3, 7, 0)]], [[2], [P(3, 4, 9)]]], "the pieces of sample 3 leave out its tokens 0..3"),
    ],
)
def test_wrong_plans(dealt: list, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SplitPlan.of(dealt)


def test_a_swapped_order_is_a_circle_of_waits() -> None:
    with pytest.raises(CycleError):
        wait_graph(SWAPPED).prepare()
    wait_graph([SWAPPED[0], SWAPPED[1][::-1]]).prepare()


def test_waves_zigzag_and_riders() -> None:
    plan = SplitPlan.of([[[P(0, 0, 4), P(0, 8, 12), 5], [P(1, 0, 2)]], [[7], [P(0, 4, 8)], [P(1, 2, 9)]]])
    assert plan.waves == 2
    assert {each.piece.sample: each.wave for each in plan.pieces} == {0: 0, 1: 1}
    assert plan.tokens == [6, 4]
    assert [(each.offset, each.read) for each in plan.of_rank(0)] == [(0, 4), (4, 0), (4, 2)]
    with pytest.raises(ValueError, match=r"Piece\(sample=0, start=4, stop=4, parent=None\) has no tokens"):
        Piece(0, 4, 4)


# ------------------------------------------------------------------ sampler and packs

LENGTHS = [4000, 300, 20, 3500, 80, 500, 30, 60]


def samplers(**options: object) -> list[MinibatchSampler]:
    options = {"samples_per_rank": 2, "token_cap": 4096, "world": 2, "split": True, "cost": COST} | options
    return [MinibatchSampler(LENGTHS, rank=rank, **options) for rank in range(options["world"])]


def test_every_rank_yields_its_part_of_one_plan() -> None:
    one, other = samplers()
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.split is None) == (theirs.split is None)
        if mine.split is not None:
            assert mine.split.digest == theirs.split.digest == SplitPlan.of([mine, theirs]).digest
    assert any(packs.split for packs in one), "the second epoch splits too"
    sizes = {each.split_tokens for each in samplers(split=700)}
    assert (2000 < one.split_tokens < 2300, sizes) == (True, {700})
    with pytest.raises(ValueError, match="split is True with balance 'micro'"):
        samplers(balance="micro")


@pytest.mark.parametrize("balance", ["mini", "queue"])
def test_a_sample_that_cannot_be_cut_is_named_by_its_place_in_the_data_set(balance: str) -> None:
    one, _ = samplers(balance=balance, token_cap=3600, split=100, counter=OwnCounter())
    with pytest.raises(ValueError, match=r"sample 0 has 4000 tokens, over the token_cap of 3600"):
        list(one)


def test_a_queue_holds_the_whole_samples_and_counts_each_target_once() -> None:
    one, other = samplers(balance="queue", counter=OwnCounter())
    data = PackedDataset(Samples())

    def targets(packs: list[list[Entry]]) -> int:
        return count_target_tokens(pack_collate(data.__getitems__(packs)))

    were_split = []
    for mine, theirs in zip(one, other, strict=True):
        wave = [*mine.waves[0], *mine.waves[1]]
        were_split.append(mine.split is not None)
        assert len(wave) == 2 * were_split[-1]
        assert all(isinstance(each, Piece) for pack in wave for each in pack), "nothing rides: the rest can be taken"
        counted = sum(targets([[index]]) for index in mine.own_part() + theirs.own_part())
        assert targets([*theirs, *mine]) == targets(wave) + targets(mine.packs) == counted
        assert mine.taken == [], "the other rank was first and took all"
    assert set(were_split) == {True, False}


def test_small_samples_share_a_pack_by_what_waves_cost_too() -> None:
    """Together they are little beside a rank's wave; each alone would be one more microbatch."""
    counter = OwnCounter()
    (queued,) = MinibatchSampler([4000, *[10] * 8], 5, 4096, "queue", rank=0, world=2, counter=counter, split=True)
    assert queued.split.lengths.keys() == {0}
    assert len(queued.packs) == 1


class Samples:
    def __getitem__(self, index: int) -> dict:
        ids = torch.arange(LENGTHS[index]) + 10_000 * index
        labels = ids.clone()
        labels[: LENGTHS[index] // 3] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def __len__(self) -> int:
        return len(LENGTHS)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_keeps_plan_and_targets(workers: int) -> None:
    loaders = [
        torch.utils.data.DataLoader(
            PackedDataset(Samples()), batch_sampler=each, collate_fn=pack_collate, num_workers=workers
        )
        for each in samplers()
    ]
    plain = MinibatchSampler(LENGTHS, 2, 4096, world=1, rank=0)
    whole = sum(count_target_tokens(pack_collate(PackedDataset(Samples()).__getitems__(packs))) for packs in plain)
    found = 0
    for minibatch in zip(*loaders, strict=True):
        plan = minibatch[0].split
        assert all(isinstance(packs, MinibatchPacks) for packs in minibatch)
        assert {None if packs.split is None else packs.split.digest for packs in minibatch} == {plan and plan.digest}
        found += sum(map(count_target_tokens, minibatch))
        for pack in (pack for packs in minibatch for pack in packs if "pieces" in pack):
            ids, shifted, positions = (pack[name][0] for name in ("input_ids", "shift_labels", "position_ids"))
            sample = ids // 10_000
            assert torch.equal(ids, sample * 10_000 + positions)
            learned = shifted != IGNORED
            assert torch.equal(shifted[learned], ids[learned] + 1), "a piece's last position predicts the next piece"
            assert torch.equal(learned.nonzero().flatten(), pack["target_positions"])
            starts = pack["cu_seq_lens_q"].tolist()[:-1]
            assert [int(positions[at]) for at in starts] == [
                0 if each is None else each.start for each in pack["pieces"]
            ]
    assert found == whole


def test_a_pack_of_pieces_has_no_labels_and_survives_a_pickle() -> None:
    packs = MinibatchPacks.of([[Piece(0, 5, 90), 2]], None)
    (pack,) = pickle.loads(pickle.dumps(pack_collate(PackedDataset(Samples()).__getitems__(packs))))
    assert pack["pieces"] == (Piece(0, 5, 90), None)
    with pytest.raises(KeyError, match=r"this pack has pieces of samples.*summed_loss"):
        pack["labels"]
    with pytest.raises(ValueError, match=r"pack 0, sample 0: tokens 5\.\.4000 of sample 0 are beyond its 4000 tokens"):
        pack_collate(PackedDataset(Samples()).__getitems__([[Piece(0, 5, 4001)]]))
