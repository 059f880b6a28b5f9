"""Plans of several replicas: pieces of a sample stay on one, and the step costs what its packs say."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odc_triton.balance import CostModel, MinibatchSampler, PackedDataset, assign, count_target_tokens, pack_collate
from odc_triton.balance.pieces import Entry, Piece, SplitPlan
from odc_triton.balance.queue import OwnCounter
from odc_triton.balance.split import SplitAssignment, assign_split, readable_tokens
from odc_triton.simulate.study import NAMED, named_lengths

COST = CostModel.paper_7b()
Dealt = list[list[list[Entry]]]  # by rank, then microbatch


def tokens_of(entry: Entry, lengths: list[int]) -> int:
    return entry.stop - entry.start if isinstance(entry, Piece) else lengths[entry]


def price(pack: list[Entry], lengths: list[int], cost: CostModel) -> float:
    """A piece costs what its document costs up to its end, less what it costs up to its beginning."""
    ends = [(each.start, each.stop) if isinstance(each, Piece) else (0, lengths[each]) for each in pack]
    return cost.microbatch + math.fsum(cost.sequence(stop) - cost.sequence(start) for start, stop in ends)


def step_time(dealt: Dealt, lengths: list[int], cost: CostModel) -> float:
    """When the slowest rank ends. Packs that share a sample start together and last as long as the costliest.

    Raises AssertionError if ranks would wait for each other for ever.
    """
    packs = {(rank, at): pack for rank, mine in enumerate(dealt) for at, pack in enumerate(mine)}
    of_sample = defaultdict(set)
    for place, pack in packs.items():
        for each in pack:
            of_sample[each.sample if isinstance(each, Piece) else each].add(place)
    together = {place: frozenset([place]) for place in packs}
    for places in of_sample.values():
        wave = frozenset().union(*(together[place] for place in places))
        together |= dict.fromkeys(wave, wave)
    clock, at = [0.0] * len(dealt), [0] * len(dealt)
    left = set(together.values())
    while left:
        ready = [wave for wave in left if all(at[rank] == place for rank, place in wave)]
        assert ready, f"ranks wait for each other: {sorted(map(sorted, left))}"
        for wave in ready:
            end = max(clock[rank] for rank, _ in wave) + max(price(packs[place], lengths, cost) for place in wave)
            for rank, place in wave:
                clock[rank], at[rank] = end, place + 1
            left.remove(wave)
    return max(clock)


def lock_step_time(deal: SplitAssignment, given: dict) -> float:
    """The same if all ranks of a replica were in each of its waves; a cut may leave one out, which then goes on."""
    lengths, cost, shards = given["lengths"], given["cost"], given["ranks"] // given["replicas"]
    ends = []
    for first in range(0, given["ranks"], shards):
        ranks = range(first, first + shards)
        waves = [[wave[rank] for rank in ranks] for wave in deal.waves]
        rest = [deal.packs(rank)[len(deal.waves_of(rank)) :] for rank in ranks]
        last = max(math.fsum(price(pack, lengths, cost) for pack in packs) for packs in rest)
        ends.append(math.fsum(max(price(pack, lengths, cost) for pack in wave) for wave in waves if any(wave)) + last)
    return max(ends)


def lb_mini_time(given: dict) -> float:
    options = {name: given[name] for name in ("lengths", "ranks", "token_cap", "cost")}
    return step_time(assign(balance="mini", **options), given["lengths"], given["cost"])


def check(given: dict, deal: SplitAssignment) -> float:
    """Everything that holds for each plan. Returns the step's cost."""
    lengths, ranks, replicas, cost = (given[name] for name in ("lengths", "ranks", "replicas", "cost"))
    dealt = [deal.packs(rank) for rank in range(ranks)]
    parts, homes, read = defaultdict(list), defaultdict(set), [0] * ranks
    for rank, packs in enumerate(dealt):
        for pack in packs:
            assert 0 < sum(tokens_of(each, lengths) for each in pack) <= given["token_cap"]
            for each in pack:
                start, stop = (each.start, each.stop) if isinstance(each, Piece) else (0, lengths[each])
                sample = each.sample if isinstance(each, Piece) else each
                parts[sample].append((start, stop))
                homes[sample].add(rank // (ranks // replicas))
                read[rank] += (stop - start) * (stop < lengths[sample])
                assert stop - start >= min(64, given["token_cap"] // 2, lengths[sample])
        waves = deal.waves_of(rank)
        assert packs[: len(waves)] == waves
        assert not any(isinstance(each, Piece) for pack in packs[len(waves) :] for each in pack), "waves come first"
    assert sorted(parts) == list(range(len(lengths)))
    for sample, found in parts.items():
        found.sort()
        assert [0, *(stop for _, stop in found)] == [*(start for start, _ in found), lengths[sample]]
    assert max(map(len, homes.values())) == 1, "a sample stays on one replica"
    assert max(read) <= given["tokens"]
    plan = SplitPlan.of(dealt, replicas=replicas)
    assert (plan is None) == (deal.plan is None)
    if plan is not None:
        assert plan.digest == deal.plan.digest
        assert plan.tokens == deal.plan.tokens == read
        check_buffers(deal.plan)
    time = step_time(dealt, lengths, cost)
    assert time >= math.fsum(map(cost.sequence, lengths)) / ranks * (1 - 1e-9)
    return time


def check_buffers(plan: SplitPlan) -> None:
    """A replica's part is numbered from 0, and no two of its pieces that others read share a row."""
    shards, found = plan.ranks // plan.replicas, []
    for replica in range(plan.replicas):
        part = plan.of_replica(replica)
        if part is None:
            assert not any(plan.tokens[replica * shards : (replica + 1) * shards])
            continue
        assert (part.ranks, part.replicas) == (shards, 1)
        assert part.tokens == plan.tokens[replica * shards : (replica + 1) * shards]
        found += [(replica * shards + each.rank, each.piece, each.wave) for each in part.pieces]
        own = defaultdict(list)
        for each in (each for each in part.pieces if each.read):
            own[each.rank].append((each.offset, each.offset + each.read))
        for spans in own.values():
            spans.sort()
            assert spans[0][0] == 0
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans)), "no row is shared, and none is lost"
    assert len(found) == len(set(found))
    assert set(found) == {(each.rank, each.piece, each.wave) for each in plan.pieces}


@st.composite
def minibatches(draw: st.DrawFn) -> dict:
    shards, replicas = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 4))
    ranks, token_cap = shards * replicas, draw(st.sampled_from([90, 1000, 70_000]))
    longest = draw(st.sampled_from([token_cap // 2, token_cap, min(2, shards) * token_cap, shards * token_cap]))
    kind = draw(st.sampled_from(["tailed", "equal", "long", "few", "one"]))
    most = {"few": max(1, replicas - 1), "one": 1}.get(kind, 3 * ranks)
    sizes = draw(st.lists(st.floats(0, 1), min_size=1 if kind in ("few", "one") else replicas, max_size=most))
    of = {"equal": lambda at: longest, "long": lambda at: longest - int(at * longest / 3)}
    return {
        "lengths": [of.get(kind, lambda at: max(1, int(longest ** (1 - at))))(at) for at in sizes],
        "ranks": ranks,
        "replicas": replicas,
        "token_cap": token_cap,
        "cost": CostModel(
            quadratic=COST.quadratic,
            linear=draw(st.sampled_from([COST.linear, 0.0])),
            microbatch=draw(st.sampled_from([0.0, COST.sequence(token_cap // 4)])),
        ),
    }


SPLIT_BY_ONE_OF_TWO = {
    "lengths": [70_000, 100, 100, 100],
    "ranks": 4,
    "replicas": 2,
    "token_cap": 70_000,
    "cost": COST,
}
# Dealt to two replicas, then to their ranks, they take longer than dealt to four ranks.
BETTER_WHOLE = SPLIT_BY_ONE_OF_TWO | {"lengths": [671, 614, 555, 267, 244, 129], "token_cap": 1000}


@settings(max_examples=100, deadline=None)
@given(minibatches(), st.sampled_from([0, 0.25, 1, 10]))
@example(SPLIT_BY_ONE_OF_TWO, 1)
@example(BETTER_WHOLE, 0)
def test_every_token_once_on_one_replica_at_the_estimated_cost(given: dict, caps: float) -> None:
    given["tokens"] = int(caps * given["token_cap"])
    lengths, shards = given["lengths"], given["ranks"] // given["replicas"]
    try:
        deal = assign_split(**given)
    except ValueError as error:
        assert max(lengths) > given["token_cap"]
        assert shards > 1, "no length is over the cap of a replica"
        assert re.search(r"sample \d+ has \d+ tokens, over the token_cap of", str(error))  # noqa: PT017
        given["tokens"] = sum(lengths)
        deal = assign_split(**given)
    time = check(given, deal)
    as_planned = lock_step_time(deal, given)
    assert time <= as_planned * (1 + 1e-9)
    # Of whole samples the estimate counts the fewest packs that could hold them.
    fewest = [-(-sum(lengths[i] for i in own) // given["token_cap"]) for own in deal.whole]
    packs = [len(deal.packs(rank)) - len(deal.waves_of(rank)) for rank in range(given["ranks"])]
    more = given["cost"].microbatch * max(a - b for a, b in zip(packs, fewest, strict=True))
    assert as_planned * (1 - 1e-9) - more <= deal.estimate <= as_planned * (1 + 1e-9)
    if max(lengths) <= given["token_cap"]:
        assert time <= lb_mini_time(given) * (1 + 1e-9)
    names = [1000 - 7 * i for i in range(len(lengths))]
    again, named = assign_split(**given), assign_split(**given, names=names)
    for rank in range(given["ranks"]):
        assert again.packs(rank) == deal.packs(rank)
        assert [[getattr(each, "sample", each) for each in pack] for pack in named.packs(rank)] == [
            [names[getattr(each, "sample", each)] for each in pack] for pack in deal.packs(rank)
        ]


@settings(max_examples=40, deadline=None)
@given(minibatches(), st.randoms(use_true_random=False))
def test_readable_tokens_are_enough_for_any_minibatch_of_replicas(given: dict, chance) -> None:
    data, samples = given.pop("lengths"), chance.randint(1, 2 * given["ranks"])
    tokens = readable_tokens(data, samples=samples, **given)
    lengths = chance.sample(data, chance.randint(1, min(samples, len(data))))
    check(given | {"tokens": tokens, "lengths": lengths}, assign_split(lengths, tokens=tokens, **given))


def test_samples_of_less_than_an_even_share_are_split_if_whole_ones_are_uneven() -> None:
    """Of five equal samples one of four ranks has two; of two replicas one has three for its two ranks."""
    deal = assign_split([1000] * 5, ranks=4, replicas=2, token_cap=2000, tokens=2000, cost=COST)
    assert deal.estimate == pytest.approx(1.5 * COST.sequence(1000), rel=0.01)


def test_a_replica_with_too_many_samples_over_the_cap_gives_some_away() -> None:
    """By cost alone one replica has the longest sample, and the other all the rest."""
    lengths, given = [8000, *[1001] * 39], {"ranks": 16, "replicas": 2, "token_cap": 1000}
    given["cost"] = CostModel(quadratic=1.0, linear=0.0)
    tokens = readable_tokens(lengths, samples=40, **given)
    deal = assign_split(lengths, tokens=tokens, **given)
    check(given | {"tokens": tokens, "lengths": lengths}, deal)
    homes = {(each.piece.sample, each.rank // 8) for each in deal.plan.pieces}
    assert sorted(home for _, home in homes) == [0] * 20 + [1] * 20


def share_of_bound(name: str, samples: int, *, ranks: int, replicas: int = 1, seed: int) -> float:
    """Of the time in which all ranks compute all the time, or those of a replica its longest sample."""
    lengths, longest = named_lengths(name, samples, seed=seed), NAMED[name].longest
    given = {"ranks": ranks, "replicas": replicas, "token_cap": longest, "cost": COST}
    given["tokens"] = readable_tokens([longest], samples=samples, **given)
    costs = [COST.sequence(length) for length in lengths]
    time = check(given | {"lengths": lengths}, assign_split(lengths, **given))
    return max(math.fsum(costs) / ranks, max(costs) * replicas / ranks) / time


@pytest.mark.parametrize(
    ("name", "samples", "ranks", "seed", "share"),
    [
        ("aime", 16, 8, 46, 0.99),  # 0.89 if the longest few are not tried once all others are too many
        ("longalign", 4, 4, 22, 0.99),  # 0.66 if each of two is cut over two ranks
        ("longalign", 8, 4, 71, 0.76),  # 0.63 if parts make up for whole samples entirely or not at all
    ],
)
def test_hard_cases_come_near_an_even_share(name: str, samples: int, ranks: int, seed: int, share: float) -> None:
    assert share_of_bound(name, samples, ranks=ranks, seed=seed) >= share


@pytest.mark.parametrize(("replicas", "name", "samples"), [(2, "longalign", 1), (2, "swe-smith", 2), (4, "aime", 4)])
def test_replicas_come_near_an_even_share(replicas: int, name: str, samples: int) -> None:
    ranks = 4 * replicas
    shares = [share_of_bound(name, samples * ranks, ranks=ranks, replicas=replicas, seed=seed) for seed in range(8)]
    assert math.fsum(shares) / len(shares) >= 0.97
    assert min(shares) >= 0.9


def test_each_replica_splits_its_own_longest() -> None:
    lengths, options = [65536, 64000, 300, 200], {"token_cap": 70_000, "cost": COST, "ranks": 8}
    deal = assign_split(lengths, tokens=32768, replicas=2, **options)
    homes = {(each.piece.sample, each.rank // 4) for each in deal.plan.pieces}
    assert sorted(home for _, home in homes) == [0, 1]
    assert deal.estimate == pytest.approx(COST.sequence(65536) / 4, rel=0.02)
    with pytest.raises(ValueError, match=r"has pieces on ranks of replicas \[0, 1\]"):
        SplitPlan.of([deal.packs(rank) for rank in range(8)], replicas=4)
    assert assign_split(lengths, tokens=32768, replicas=8, **options).plan is None, "one rank each can split nothing"


def test_few_samples_are_split_to_make_all_replicas_even() -> None:
    """Of samples like LongAlign's, whose longest are four times the mean."""
    chance = random.Random(0)
    for _ in range(4):
        lengths = [min(65_536, round(chance.lognormvariate(9.33, 0.76))) for _ in range(256)]
        how = {"ranks": 128, "replicas": 16, "token_cap": 65_536, "cost": COST}
        dealt = assign_split(lengths, tokens=readable_tokens([65_536], samples=256, **how), **how)
        even = math.fsum(map(COST.sequence, lengths)) / 128
        assert even <= dealt.estimate <= 1.005 * even
        assert len(dealt.plan.lengths) <= 3 * 16


def test_a_sample_over_what_a_replica_holds_is_refused() -> None:
    """Two ranks of 1000 tokens hold 2000 of one sample; four would hold 2500."""
    options = {"ranks": 4, "token_cap": 1000, "cost": COST}
    assert assign_split([2500], tokens=1000, replicas=1, **options).plan
    wrong = (
        r"lengths\[1\] is 2500 tokens, over the 2000 of 2 ranks that share memory, each with a token_cap of 1000: raise"
    )
    with pytest.raises(ValueError, match=wrong):
        assign_split([10, 2500], tokens=1000, replicas=2, **options)
    with pytest.raises(ValueError, match=wrong):
        MinibatchSampler([10, 2500], 1, 1000, rank=0, world=4, replicas=2, split=True)
    for replicas in (4, 1):
        with pytest.raises(ValueError, match=r"lengths\[0\] is 1001 tokens, over the token_cap of 1000: raise the cap"):
            assign_split([1001], tokens=9999, replicas=replicas, **options | {"ranks": replicas})


@pytest.mark.parametrize("replicas", [0, 3, 8])
def test_replicas_divide_the_ranks(replicas: int) -> None:
    with pytest.raises(ValueError, match=f"replicas is {replicas}: give a divisor of the 4 ranks"):
        assign_split([5], ranks=4, replicas=replicas, tokens=1, token_cap=9, cost=COST)
    with pytest.raises(ValueError, match=f"replicas is {replicas}: give a divisor of the 4 ranks"):
        readable_tokens([5], ranks=4, replicas=replicas, samples=1, token_cap=9, cost=COST)
    with pytest.raises(ValueError, match=f"replicas is {replicas}: give a divisor of the world of 4 ranks"):
        MinibatchSampler([5], 1, 9, rank=0, world=4, replicas=replicas)
    with pytest.raises(ValueError, match=f"4 ranks can't be split into {replicas} equal replicas"):
        SplitPlan.of([[]] * 4, replicas=replicas)


# ------------------------------------------------------------------ sampler and packs

LENGTHS = [4000, 300, 20, 3500, 80, 500, 30, 60, 3900, 2, 1500, 100]


class Samples:
    def __getitem__(self, index: int) -> dict:
        return {"input_ids": torch.arange(LENGTHS[index]) + 10_000 * index}

    def __len__(self) -> int:
        return len(LENGTHS)


def samplers(**options: object) -> list[MinibatchSampler]:
    options = {"samples_per_rank": 2, "token_cap": 4096, "world": 4, "cost": COST} | options
    return [MinibatchSampler(LENGTHS, rank=rank, **options) for rank in range(4)]


def test_the_ranks_of_all_replicas_yield_one_plan_and_each_token_once() -> None:
    split, whole = samplers(split=True, replicas=2), samplers()
    data, were_split = PackedDataset(Samples()), 0
    for together, plain in zip(zip(*split, strict=True), zip(*whole, strict=True), strict=True):
        assert {each.state_dict() == whole[0].state_dict() for each in split} == {True}, "the position means the same"
        plan = SplitPlan.of(together, replicas=2)
        assert {each.split and (each.split.digest, each.split.replicas) for each in together} == {
            plan and (plan.digest, 2)
        }
        were_split += plan is not None
        found, expected = (
            [pack for mine in of_ranks for pack in pack_collate(data.__getitems__(mine))]
            for of_ranks in (together, plain)
        )
        tokens, as_whole = (
            Counter(torch.cat([p["input_ids"][0] for p in each]).tolist()) for each in (found, expected)
        )
        assert tokens == as_whole
        assert set(tokens.values()) == {1}
        assert count_target_tokens(found) == count_target_tokens(expected)
    assert were_split
    resumed = samplers(split=True, replicas=4)[0]
    resumed.load_state_dict(split[0].state_dict(minibatches_done=1))
    assert resumed.minibatch == 1


def test_a_queue_of_split_samples_refuses_replicas() -> None:
    with pytest.raises(ValueError, match="balance 'queue' can't split sequences with 2 replicas: use 'mini'"):
        samplers(balance="queue", split=True, replicas=2, counter=OwnCounter())
    samplers(balance="queue", replicas=2, counter=OwnCounter())
