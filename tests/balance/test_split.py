"""Cutting the longest sequences over ranks: every token once, within the limits, evenly, at the estimated cost, and no
circle of waits. Also with several replicas, and with images, which are not cut.
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odc_triton.balance import CostModel, MinibatchSampler, assign
from odc_triton.plan.cuts import most_cuts
from odc_triton.plan.entries import Entry, Segment, number_of
from odc_triton.plan.line import Strip, cut_line
from odc_triton.plan.line import price as line_price
from odc_triton.plan.plan import Plan
from odc_triton.plan.queue import OwnCounter
from odc_triton.plan.segments import SplitPlan
from odc_triton.plan.split import readable_tokens
from odc_triton.tools.simulate.study import NAMED, named_lengths
from tests.support.planned import split

COST = CostModel.paper_7b()
COSTS = [COST, CostModel(quadratic=1.0, linear=0.0), CostModel(quadratic=0.0, linear=1.0)]
FLAT = COSTS[-1]
Dealt = list[list[list[Entry]]]  # by rank, then microbatch


def segment_of(entry: Entry, lengths: list[int]) -> Segment:
    return entry if isinstance(entry, Segment) else Segment(entry, 0, lengths[entry])


def tokens_of(pack: list[Entry], lengths: list[int]) -> int:
    return sum(len(segment_of(each, lengths)) for each in pack)


def price(pack: list[Entry], given: dict) -> float:
    """A segment costs what its document costs up to its end, less what it costs up to its beginning; the first one also
    what its sample's images cost.
    """
    cost, extra = given["cost"], given.get("extra") or [0.0] * len(given["lengths"])
    segments = [segment_of(each, given["lengths"]) for each in pack]
    own = math.fsum(cost.sequence(each.stop) - cost.sequence(each.start) for each in segments)
    return cost.microbatch + own + math.fsum(extra[each.sample] for each in segments if each.start == 0)


def step_time(dealt: Dealt, given: dict) -> float:
    """When the slowest rank ends. Packs that share a sample start together and last as long as the costliest.

    Raises AssertionError if ranks would wait for each other for ever.
    """
    packs = {(rank, at): pack for rank, mine in enumerate(dealt) for at, pack in enumerate(mine)}
    of_sample = defaultdict(set)
    for place, pack in packs.items():
        for each in pack:
            of_sample[number_of(each)].add(place)
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
            end = max(clock[rank] for rank, _ in wave) + max(price(packs[place], given) for place in wave)
            for rank, place in wave:
                clock[rank], at[rank] = end, place + 1
            left.remove(wave)
    return max(clock)


def waves_of(deal: Plan, rank: int) -> int:
    """How many of its packs are of waves."""
    return sum(map(bool, deal.ready[rank]))


def lock_step_time(deal: Plan, given: dict) -> float:
    """The same if all ranks of a replica were in each of its waves; a cut may leave one out, which then goes on."""
    shards, ends = given["ranks"] // given["replicas"], []
    for first in range(0, given["ranks"], shards):
        ranks = range(first, first + shards)
        waves = zip(*(deal.ready[rank] for rank in ranks), strict=True)
        rest = [deal.packs(rank)[waves_of(deal, rank) :] for rank in ranks]
        last = max(math.fsum(price(pack, given) for pack in packs) for packs in rest)
        ends.append(math.fsum(max(price(pack, given) for pack in wave) for wave in waves if any(wave)) + last)
    return max(ends)


def check(given: dict, dealt: Dealt, planned: SplitPlan | None) -> float:
    """Everything that holds for each plan. Returns the step's cost."""
    lengths, ranks, token_cap, replicas = given["lengths"], given["ranks"], given["token_cap"], given.get("replicas", 1)
    floors = given.get("floors") or [0] * len(lengths)
    parts, homes, read = defaultdict(list), defaultdict(set), [0] * ranks
    for rank, packs in enumerate(dealt):
        for pack in packs:
            assert 0 < tokens_of(pack, lengths) <= token_cap
            for each in (segment_of(each, lengths) for each in pack):
                least = min(64, token_cap // 2, lengths[each.sample])
                assert len(each) >= least or each.start == floors[each.sample]
                parts[each.sample].append((each.start, each.stop))
                homes[each.sample].add(rank // (ranks // replicas))
                read[rank] += len(each) * (each.stop < lengths[each.sample])
                assert each.start == 0 or each.start >= floors[each.sample], "images are not cut"
    assert sorted(parts) == list(range(len(lengths)))
    for sample, found in parts.items():
        found.sort()
        assert [0, *(stop for _, stop in found)] == [*(start for start, _ in found), lengths[sample]]
    assert max(map(len, homes.values())) == 1, "a sample stays on one replica"
    assert max(read) <= given["tokens"]
    plan = SplitPlan.of(dealt, replicas=replicas)
    assert (plan is None) == (planned is None)
    if plan is not None:
        assert plan.tokens == planned.tokens == read
        check_buffers(planned)
    time = step_time(dealt, given)
    assert time >= math.fsum(map(given["cost"].sequence, lengths)) / ranks * (1 - 1e-9)
    return time


def check_buffers(plan: SplitPlan) -> None:
    """A replica's part is numbered from 0, and no two of its segments that others read share a row."""
    shards, found = plan.ranks // plan.replicas, []
    for replica in range(plan.replicas):
        part = plan.of_replica(replica)
        tokens = plan.tokens[replica * shards : (replica + 1) * shards]
        if part is None:
            assert not any(tokens)
            continue
        assert (part.ranks, part.replicas, part.tokens) == (shards, 1, tokens)
        found += [(replica * shards + each.rank, each.segment, each.wave) for each in part.segments]
        for rank in range(shards):
            spans = sorted((each.offset, each.offset + each.read) for each in part.of_rank(rank) if each.read)
            assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), tokens[rank]]
    assert sorted(found, key=str) == sorted(((each.rank, each.segment, each.wave) for each in plan.segments), key=str)


def packs_of(deal: Plan) -> Dealt:
    return [deal.packs(rank) for rank in range(len(deal.unpacked))]


def checked(given: dict) -> Plan:
    deal = split(**given)
    check(given, packs_of(deal), deal.split)
    return deal


@st.composite
def minibatches(draw: st.DrawFn, *, replicas: bool = True, images: bool = True) -> dict:
    shards, groups = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2, 3, 4])) if replicas else 1
    ranks, token_cap = shards * groups, draw(st.sampled_from([90, 1000, 70_000]))
    longest = draw(st.sampled_from([token_cap // 2, token_cap, min(2, shards) * token_cap, shards * token_cap]))
    of = draw(
        st.sampled_from(
            [
                lambda at: longest,
                lambda at: longest - int(at * longest / 3),
                lambda at: max(1, int(longest ** (1 - at))),  # a long tail
                lambda at: max(1, int(longest * at)),
            ]
        )
    )
    lengths = [of(at) for at in draw(st.lists(st.floats(0, 1), min_size=1, max_size=3 * ranks))]
    cost = draw(st.sampled_from(COSTS))
    found = {
        "lengths": lengths,
        "ranks": ranks,
        "replicas": groups,
        "token_cap": token_cap,
        "cost": CostModel(
            quadratic=cost.quadratic,
            linear=cost.linear,
            microbatch=draw(st.sampled_from([0.0, cost.sequence(token_cap // 4)])),
        ),
    }
    if images and draw(st.booleans()):
        floors = [draw(st.sampled_from([0, min(length, 50), length // 3, length])) for length in lengths]
        most = draw(st.sampled_from([0.1, 1.0, 5.0])) * cost.sequence(longest)
        found |= {"floors": floors, "extra": [draw(st.floats(0, most)) if floor else 0.0 for floor in floors]}
    return found


SPLIT_BY_ONE_OF_TWO = {"lengths": [70_000, 100, 100, 100], "ranks": 4, "replicas": 2, "token_cap": 70_000, "cost": COST}
# Dealt to two replicas, then to their ranks, they take longer than dealt to four ranks.
BETTER_WHOLE = SPLIT_BY_ONE_OF_TWO | {"lengths": [671, 614, 555, 267, 244, 129], "token_cap": 1000}


def refused(given: dict, error: ValueError) -> None:
    """It names a sample over the cap, and which part is not cut."""
    lengths, floors = given["lengths"], given.get("floors") or [0] * len(given["lengths"])
    what = r"sample (\d+) has \d+ tokens, over the token_cap of .* sample(.*first (\d+), can't be cut)?$"
    found = re.search(what, str(error))
    assert lengths[int(found[1])] > given["token_cap"]
    assert int(found[3] or 0) == floors[int(found[1])]


@settings(max_examples=300)
@given(minibatches(), st.sampled_from([0, 0.25, 1, 10]))
@example(SPLIT_BY_ONE_OF_TWO, 1)
@example(BETTER_WHOLE, 0)
def test_every_token_once_within_the_limits_at_the_estimated_cost(given: dict, caps: float) -> None:
    lengths, cap, shards = given["lengths"], given["token_cap"], given["ranks"] // given["replicas"]
    floors = given.get("floors") or [0] * len(lengths)
    given["tokens"] = int(caps * cap)
    try:
        deal = split(**given)
    except ValueError as error:
        refused(given, error)
        assert shards > 1, "no length is over the cap of a replica"
        given["tokens"] = sum(lengths)
        if any(
            floor > cap or length - floor > cap * (shards - 1) for floor, length in zip(floors, lengths, strict=True)
        ):
            return
        deal = split(**given)  # only the tokens to read were missing
    time = check(given, packs_of(deal), deal.split)
    as_planned = lock_step_time(deal, given)
    assert time <= as_planned * (1 + 1e-9)
    # Of whole samples the estimate counts the fewest packs that could hold them.
    fewest = [-(-sum(lengths[i] for i in own) // cap) for own in deal.unpacked]
    packs = [len(deal.packs(rank)) - waves_of(deal, rank) for rank in range(given["ranks"])]
    more = given["cost"].microbatch * max(a - b for a, b in zip(packs, fewest, strict=True))
    assert as_planned * (1 - 1e-9) - more <= deal.estimate <= as_planned * (1 + 1e-9)
    for rank, packs in enumerate(packs_of(deal)):
        waves = [*filter(None, deal.ready[rank])]
        assert packs[: len(waves)] == waves
        assert not any(isinstance(each, Segment) for pack in packs[len(waves) :] for each in pack)
        prices = [price(pack, given) for pack in packs[len(waves) :]]
        assert prices == sorted(prices, reverse=True), "costliest first"
    if max(lengths) <= cap:
        options = {name: given.get(name) for name in ("lengths", "ranks", "token_cap", "cost", "extra")}
        assert time <= step_time(assign(balance="mini", **options), given) * (1 + 1e-9)
    names = [1000 - 7 * i for i in range(len(lengths))]
    again, named = split(**given), split(**given, names=names)
    assert packs_of(again) == packs_of(deal)
    assert [[[number_of(each) for each in pack] for pack in packs] for packs in packs_of(named)] == [
        [[names[number_of(each)] for each in pack] for pack in packs] for packs in packs_of(deal)
    ]


@settings(max_examples=150)
@given(minibatches(images=False), st.randoms(use_true_random=False))
def test_readable_tokens_are_enough_for_any_minibatch(given: dict, chance: random.Random) -> None:
    data, samples = given.pop("lengths"), chance.randint(1, 2 * given["ranks"])
    tokens = readable_tokens(data, samples=samples, **given)
    checked(given | {"tokens": tokens, "lengths": chance.sample(data, chance.randint(1, min(samples, len(data))))})


@settings(max_examples=60)
@given(minibatches(replicas=False, images=False), st.booleans(), st.randoms(use_true_random=False))
def test_with_a_queue_every_token_once_in_any_order_of_taking(given: dict, few: bool, chance: random.Random) -> None:
    ranks, lengths = given["ranks"], given["lengths"]
    options = {name: given[name] for name in ("lengths", "token_cap", "cost")}
    options |= {"samples_per_rank": -(-len(lengths) // ranks), "world": ranks, "balance": "queue"}
    options |= {"counter": OwnCounter(), "split": given["token_cap"] // 4 if few else True}
    samplers = [MinibatchSampler(rank=rank, **options) for rank in range(ranks)]
    try:
        queues = [next(iter(each)) for each in samplers]
    except ValueError as error:
        assert few, "its own number is enough"
        refused(given, error)
        return
    assert len({each.split and each.split.digest for each in queues}) == 1, "one plan on every rank"
    assert sorted(index for each in queues for index in each.own_part()) == list(range(len(lengths)))
    dealt: Dealt = [[] for _ in queues]
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
        assert packs == [*filter(None, queues[rank].waves[rank]), *taken], "waves first, in their order"


@settings(max_examples=20)
@given(st.integers(2000, 65536), st.integers(2, 9), st.sampled_from([0.05, 0.2, 0.5]), st.sampled_from(COSTS[::2]))
def test_parts_that_make_pairs_get_fewer_tokens(length: int, ranks: int, much: float, base: CostModel) -> None:
    """One sample, whose parts but the first and the last make one: as even as by bisection of the costliest part."""
    cost = replace(base, pair=much * base.linear)
    between = replace(base, linear=base.linear + cost.pair)

    def end_of(level: float) -> float:
        """Where parts of `level` end."""
        end = base.reach(0, level)
        for _ in range(ranks - 2):
            end = between.reach(end, level)
        return base.reach(end, level)

    low, high = 0.0, between.sequence(length)
    for _ in range(60):
        low, high = (low, middle) if end_of(middle := (low + high) / 2) >= length else (middle, high)
    parts = cut_line([Strip(0, 0, length)], [1.0] * ranks, cost, 1)
    prices = [line_price(part, [Strip(0, 0, length)], cost) for part in parts]
    assert max(prices) <= 1.02 * high + between.segment(length - 1, length)
    equal = cut_line([Strip(0, 0, length)], [1.0] * ranks, base, 1)
    if ranks == 2:  # none makes a pair
        assert parts == equal
        assert prices == [line_price(part, [Strip(0, 0, length)], base) for part in parts]
    else:
        assert tokens_of(parts[0], [length]) > tokens_of(equal[0], [length])


@settings(max_examples=30)
@given(st.lists(st.integers(64, 65536), min_size=1, max_size=9), st.integers(2, 8), st.sampled_from([0.1, 1.0]))
def test_a_plan_that_knows_of_pairs_is_not_worse_than_one_that_does_not(lengths: list, ranks: int, much: float) -> None:
    cost = replace(COST, pair=much * COST.linear)
    given = {"lengths": lengths, "ranks": ranks, "token_cap": 10**6, "tokens": 10**6}
    strips = [Strip(at, 0, length) for at, length in enumerate(lengths)]
    plain, aware = split(**given, cost=COST), split(**given, cost=cost)
    check(given | {"cost": COST}, packs_of(aware), aware.split)
    waves = zip(*plain.ready, strict=True)
    worse = math.fsum(max(line_price(part, strips, cost) for part in wave) for wave in waves)
    worse += max(cost.sequence(0) + math.fsum(cost.sequence(lengths[i]) for i in own) for own in plain.unpacked)
    assert aware.estimate <= worse / 0.95  # a split plan must be 5% better


@settings(max_examples=40)
@given(minibatches(images=False), st.integers(0, 3))
@example({"lengths": [1000] * 3, "ranks": 3, "replicas": 1, "token_cap": 400, "cost": COST}, 1)
def test_others_go_on_at_no_more_places_than_have_room(given: dict, cuts: int) -> None:
    """Or it is said that samples over the cap need more."""
    given |= {"tokens": 10 * max(given["lengths"])}
    free = split(**given)
    most = 0 if free.split is None else most_cuts(free.split)[0]
    try:
        found = split(**given, split_cuts=cuts)
    except ValueError as error:
        assert f"split_cuts is {cuts}: give --split-cuts, or" in str(error)  # noqa: PT017
        assert most > cuts
        return
    check(given, packs_of(found), found.split)
    assert found.split is None or most_cuts(found.split)[0] <= cuts
    if most <= cuts:
        assert found.estimate <= free.estimate


@pytest.mark.parametrize(("length", "ranks"), [(140, 8), (70_000, 8), (70_000, 2)])
def test_readable_tokens_are_enough_to_cut_one_long_sample(length: int, ranks: int) -> None:
    """Of 140 tokens on 8 ranks a part has 18, but no segment has fewer than 64."""
    for cost in COSTS:
        options = {"ranks": ranks, "token_cap": 70_000, "cost": cost}
        tokens = readable_tokens([length], samples=1, **options)
        assert split([length], tokens=tokens, **options).split is not None


def test_samples_of_less_than_an_even_share_are_split_if_whole_ones_are_uneven() -> None:
    """Of five equal samples one of four ranks has two; of two replicas one has three for its two ranks."""
    deal = split([1000] * 5, ranks=4, replicas=2, token_cap=2000, tokens=2000, cost=COST)
    assert deal.estimate == pytest.approx(1.5 * COST.sequence(1000), rel=0.01)


def test_a_replica_with_too_many_samples_over_the_cap_gives_some_away() -> None:
    """By cost alone one replica has the longest sample, and the other all the rest."""
    given = {"lengths": [8000, *[1001] * 39], "ranks": 16, "replicas": 2, "token_cap": 1000, "cost": COSTS[1]}
    deal = checked(given | {"tokens": readable_tokens(samples=40, **given)})
    homes = {(each.segment.sample, each.rank // 8) for each in deal.split.segments}
    assert sorted(home for _, home in homes) == [0] * 20 + [1] * 20


def share_of_bound(name: str, samples: int, *, ranks: int, replicas: int = 1, seed: int) -> float:
    """Of the time in which all ranks compute all the time, or those of a replica its longest sample."""
    lengths, longest = named_lengths(name, samples, seed=seed), NAMED[name].longest
    given = {"ranks": ranks, "replicas": replicas, "token_cap": longest, "cost": COST}
    given |= {"tokens": readable_tokens([longest], samples=samples, **given), "lengths": lengths}
    deal = split(**given)
    costs = [COST.sequence(length) for length in lengths]
    bound = max(math.fsum(costs) / ranks, max(costs) * replicas / ranks)
    return bound / check(given, packs_of(deal), deal.split)


@pytest.mark.parametrize(
    ("name", "samples", "ranks", "replicas", "seeds", "share"),
    [
        ("aime", 16, 8, 1, [46], 0.99),  # 0.89 if the longest few are not tried once all others are too many
        ("longalign", 4, 4, 1, [22], 0.99),  # 0.66 if each of two is cut over two ranks
        ("longalign", 8, 4, 1, [71], 0.76),  # 0.63 if parts make up for whole samples entirely or not at all
        ("longalign", 8, 8, 2, range(8), 0.97),
        ("swe-smith", 16, 8, 2, range(8), 0.97),
        ("aime", 64, 16, 4, range(8), 0.97),
        ("longalign", 256, 128, 16, range(2), 0.99),
    ],
)
def test_ranks_come_near_an_even_share(
    name: str, samples: int, ranks: int, replicas: int, seeds: list[int], share: float
) -> None:
    shares = [share_of_bound(name, samples, ranks=ranks, replicas=replicas, seed=seed) for seed in seeds]
    assert math.fsum(shares) / len(shares) >= share
    assert min(shares) >= min(share, 0.9)


def test_a_line_is_cut_by_the_cost_of_images_and_after_them() -> None:
    """The first 100 tokens cost 500 more; so do the other 500."""
    strip = Strip(0, 0, 600, floor=100, extra=500.0)
    halves = [[Segment(0, 0, 300)], [Segment(0, 300, 600)]]
    assert cut_line([strip], [8.0, 3.0], FLAT) == halves
    assert cut_line([strip], [1.0, 1.0], None) == halves, "of tokens"
    for shares in ([1.0, 1.2], [4.0, 7.0]):
        assert cut_line([strip], shares, FLAT) == [[Segment(0, 0, 100)], [Segment(0, 100, 600)]], "at the floor"
    assert cut_line([strip], [1.0, 9.0], FLAT) == [[], [0]]
    late = strip._replace(floor=580)
    assert cut_line([late], [9.0, 1.0], FLAT) == [[Segment(0, 0, 580)], [Segment(0, 580, 600)]], "few tokens are left"
    two = cut_line([strip, Strip(1, 0, 1100)], [1.0, 1.0], FLAT)
    assert two == [[0], [1]], "what comes after is further on"


def test_ranks_make_up_for_images() -> None:
    """A sample of 1000 tokens whose images cost as much, and one of 1000: 1500 for each rank."""
    how = {"ranks": 2, "token_cap": 2000, "cost": FLAT, "tokens": 1000}
    deal = split([1000, 1000], **how, extra=[0.0, 1000.0], floors=[0, 10])
    assert deal.estimate == 1500


@pytest.mark.parametrize(
    ("lengths", "floors", "tokens", "message"),
    [
        ([9, 400], [0, 100], 400, None),
        ([9, 385], [0, 85], 400, None),
        ([9, 110], [0, 100], 400, None),
        ([390, 380, 370], [100, 100, 99], 400, None),
        ([9, 330], [0, 101], 400, "sample 7 has 330 .*; the tokens of its images, within the first 101, can't be cut"),
        ([390, 380, 370], [100, 101, 99], 400, "sample 7 has 380 tokens, .* within the first 101, can't be cut"),
        ([9, 391], [0, 91], 50, "others may read 50 tokens .* need 98: .* images, within the first 91, can't"),
        ([9, 400], [0, 0], 50, r"need 100: raise the cap or the tokens to read, or truncate or drop the sample$"),
    ],
)
def test_samples_over_the_cap(lengths: list[int], floors: list[int], tokens: int, message: str | None) -> None:
    given = {"ranks": 4, "token_cap": 100, "tokens": tokens, "cost": CostModel(quadratic=1.0, linear=1.0)}
    given |= {"lengths": lengths, "floors": floors}
    if message is None:
        checked(given)
    else:
        with pytest.raises(ValueError, match=f"tokens, over the token_cap of 100, .*{message}|{message}"):
            split(**given, names=[6, 7, 8])


def test_readable_tokens_are_enough_for_long_images() -> None:
    given = {"lengths": [190, 180, 110], "floors": [95, 98, 100], "ranks": 4, "token_cap": 100, "cost": FLAT}
    tokens = readable_tokens(samples=3, **given)
    assert tokens >= 95 + 98 + 100
    checked(given | {"tokens": tokens})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks": 0}, "ranks is 0: give the number of ranks"),
        ({"tokens": -1}, "tokens is -1: give the tokens per rank"),
        ({"token_cap": 0}, "token_cap is 0"),
        ({"replicas": 3}, "replicas is 3: give a divisor of the 4 ranks"),
        ({"extra": [1.0] * 3}, "extra has 3 costs for 2 samples"),
        ({"extra": [1.0, -1.0]}, r"extra\[1\] is -1.0: give a finite cost of 0 or more"),
        ({"extra": [math.nan, 1.0]}, r"extra\[0\] is nan: give a finite cost of 0 or more"),
        ({"floors": [3]}, "one of 1 `floors` for 2 samples is .* up to its last image's"),
        ({"floors": [3, 8]}, "one of 2 `floors` for 2 samples is 8, of 7 tokens"),
        ({"floors": [-1, 3]}, "samples is -1"),
        ({"lengths": [37, 7]}, r"lengths\[0\] is 37 tokens, over the 36 of 4 ranks that share memory, each with a tok"),
        ({"lengths": [9, 19], "replicas": 2}, r"lengths\[1\] is 19 tokens, over the 18 of 2 ranks that share memory"),
        ({"lengths": [9, 10], "replicas": 4}, r"lengths\[1\] is 10 tokens, over the token_cap of 9: raise the cap"),
    ],
)
def test_refusals(changed: dict, words: str) -> None:
    given = {"lengths": [9, 7], "ranks": 4, "tokens": 1, "token_cap": 9, "cost": FLAT} | changed
    with pytest.raises(ValueError, match=words):
        split(**given)


P = Segment


@pytest.mark.parametrize(
    ("dealt", "words"),
    [
        ([[[P(0, 0, 5)], [P(1, 0, 3)]], [[P(1, 3, 4)], [P(0, 5, 6)]]], "ranks compute samples [0, 1] in different ord"),
        (
            [[[P(0, 0, 5)], [P(0, 5, 6)]]],
            "rank 0 has segments of samples [0], which are computed together, in two packs",
        ),
        ([[[P(0, 0, 5)]], [[P(0, 6, 7)]]], "the segments of sample 0 leave out its tokens 5..5"),
        ([[[P(3, 2, 5)]], [[P(3, 5, 7)]]], "the segments of sample 3 leave out its tokens 0..1"),
        ([[[P(0, 0, 5)]], [[P(0, 4, 7)]]], "the segments of sample 0 hold twice its tokens 4..4"),
        ([[[P(0, 0, 5)]], [[P(0, 0, 5)]]], "tokens 0..4 of sample 0 are in two packs"),
        ([[[P(0, 0, 5)]], [[1]]], "tokens 0..4 of sample 0 are its only segment"),
        ([[[P(0, 0, 5)]], [[P(0, 5, 7), 0]]], "sample 0 is in the packs both whole and in segments"),
        ([[[P(2, 4, 6, 1)]], [[P(1, 3, 7, 0)]]], "tokens 3..6 of sample 1 branch from sample 0, and no segment here"),
        ([[[0]], [[P(1, 3, 7, 0)]]], "give all segments of sample 0, as Segment(0, 0, …) if it is not split"),
        ([[[P(0, 0, 2)]], [[P(1, 3, 7, 0)]]], "tokens 3..6 of sample 1 branch from sample 0, and no segment here"),
        ([[[P(0, 0, 2), P(0, 3, 9)]], [[P(1, 5, 7, 0)]]], "the segments of sample 0 leave out its tokens 2..2"),
        ([[[P(0, 0, 9)], [P(1, 5, 7, 0)]], [[P(2, 5, 9, 0)]]], "rank 0 has segments of samples [0, 1, 2], which are"),
        ([[[P(0, 0, 5), P(1, 3, 7, 0)]], [[2], [P(3, 4, 9)]]], "the segments of sample 3 leave out its tokens 0..3"),
    ],
)
def test_wrong_plans(dealt: list, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SplitPlan.of(dealt)


def test_waves_zigzag_and_riders() -> None:
    dealt = [[[P(0, 0, 4), P(0, 8, 12), 5], [P(1, 0, 2)]], [[7], [P(0, 4, 8)], [P(1, 2, 9)]]]
    plan = SplitPlan.of(dealt)
    assert plan.waves == 2
    assert {each.segment.sample: each.wave for each in plan.segments} == {0: 0, 1: 1}
    assert plan.tokens == [6, 4]
    assert [(each.offset, each.read) for each in plan.of_rank(0)] == [(0, 4), (4, 0), (4, 2)]
    with pytest.raises(ValueError, match=r"Segment\(sample=0, start=4, stop=4, parent=None\) has no tokens"):
        Segment(0, 4, 4)
    with pytest.raises(ValueError, match=r"has segments on ranks of replicas \[0, 1\]"):
        SplitPlan.of(dealt, replicas=2)
    with pytest.raises(ValueError, match="2 ranks can't be split into 3 equal replicas"):
        SplitPlan.of(dealt, replicas=3)
