"""Samples that share tokens: which branches from which, and their assignment to ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odc_triton.balance import CostModel, PackedDataset, pack_collate
from odc_triton.plan.cuts import most_cuts
from odc_triton.plan.entries import Segment
from odc_triton.plan.planner import assign, make_plan
from odc_triton.plan.relatives import LEAST_SHARED, find_relatives, floor_of
from odc_triton.plan.samples import Limits, Samples
from odc_triton.plan.segments import reads_of
from odc_triton.sequence.tree import rows_before
from tests.support.planned import shared

LEAST = 2
IGNORED = -100


def sample(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}


def shown(prompt: list[int], answer: list[int], images: list[tuple[int, int]] = (), learned: int = 0) -> dict:
    """`images`: (place, number), the number an image's content; its token is 9, at that place of all tokens."""
    ids = prompt + answer
    sample: dict[str, Any] = {"labels": [IGNORED] * (len(prompt) - learned) + ids[len(prompt) - learned :]}
    if images:
        places = [place for place, _ in images]
        ids = [9 if at in places else token for at, token in enumerate(ids)]
        values = [np.full((2, 3), number, dtype=np.float32) for _, number in images]
        sample |= {"pixel_values": np.concatenate(values), "image_grid_thw": np.array([[1, 1, 2]] * len(images))}
        sample["mm_token_type_ids"] = [int(at in places) for at in range(len(ids))]
    return sample | {"input_ids": ids}


# Of few different tokens, so that samples meet at every depth.
_TOKENS = st.lists(st.integers(0, 1), max_size=6)
SAMPLES = st.lists(
    st.tuples(_TOKENS, st.lists(st.integers(0, 1), min_size=1, max_size=6)).map(lambda it: sample(*it)),
    min_size=1,
    max_size=12,
)


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def first_own(samples: list[dict], pack: list[int], member: int) -> int:
    """By its definition: the first token that `member` computes, of `pack`, whose samples come before it."""
    ids, labels = (samples[member][name] for name in ("input_ids", "labels"))
    free = next((at for at, label in enumerate(labels) if at and label != IGNORED), len(ids))
    alike = min(max((common(ids, samples[each]["input_ids"]) for each in pack), default=0), free)
    return alike - 1 if alike >= LEAST else 0


@given(SAMPLES, st.randoms(use_true_random=False))
@example([sample([1, 1, 0], [1]), sample([1, 1, 0], [1]), sample([1, 1], [0, 1])], None)
def test_each_token_is_computed_once_in_a_pack(samples: list[dict], numbers: object) -> None:
    chosen = list(range(len(samples)))
    if numbers is not None:
        numbers.shuffle(chosen)
        chosen = chosen[: max(len(chosen) // 2, 1)]
    with mock.patch("odc_triton.plan.relatives.LEAST_SHARED", LEAST):
        entries = find_relatives(samples).entries(chosen)
    segments = [
        each if isinstance(each, Segment) else Segment(each, 0, len(samples[each]["input_ids"])) for each in entries
    ]
    assert sorted(each.sample for each in segments) == sorted(chosen)
    starts = {each.sample: each.start for each in segments}
    for at, segment in enumerate(segments):
        before = [each.sample for each in segments[:at]]
        assert segment.start == first_own(samples, before, segment.sample)
        assert segment.stop == len(samples[segment.sample]["input_ids"])
        assert (segment.parent in before) == (segment.start > 0)
        assert segment.parent is None or starts[segment.parent] < segment.start, (
            "that one does not compute the last of them"
        )
    (pack,) = pack_collate([PackedDataset(samples)[entries]])
    rows = pack["input_ids"][0].tolist()
    ends = pack["cu_seq_lens_q"].tolist()
    before = rows_before(ends, pack.get("segments", [None] * len(segments)), plan=None, runs=[], window=None)
    for segment, (first, end), earlier in zip(segments, pairwise(ends), before, strict=True):
        seen = [token for _, low, high in earlier for token in rows[low:high]]
        assert seen + rows[first:end] == samples[segment.sample]["input_ids"]
        assert all(high <= first for _, _, high in earlier)


_IMAGES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1)), max_size=2, unique_by=lambda it: it[0])
SHOWN = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.lists(st.integers(0, 1), min_size=1, max_size=6))
    .flatmap(lambda it: st.tuples(st.just(it), _IMAGES))
    .map(lambda it: shown(*it[0], sorted(each for each in it[1] if each[0] < len(it[0][0] + it[0][1])))),
    min_size=1,
    max_size=10,
)


# A tree over ranks that is on one rank, so nothing is read.
ON_ONE_RANK = [
    *(sample(prompt, end) for prompt, end in (([0], [0, 0]), ([0], [0, 0]), ([1], [0, 0]), ([1, 0], [0, 1]))),
    *(shown([0], [0] * tokens, [(before, 0)]) for tokens, before in ((2, 2), (4, 3), (6, 6))),
    sample([1, 0, 0, 0], [0] * 6),
]


# (tokens of the prompt, of the answer, the image's place). Cut into waves, and nothing is read: no rank waits.
IN_WAVES_WITHOUT_READS = [
    shown([0] * prompt, [0] * answer, [(place, 0)] if place is not None else [])
    for prompt, answer, place in (
        *((1, 1, None), (1, 1, 0), (1, 3, 3), (1, 2, 0), (1, 4, 3), (1, 2, None), (1, 1, None), (2, 1, None)),
        *((1, 3, 3), (2, 6, 0)),
    )
]


def contents(each: dict, tokens: int) -> list:
    """The first tokens, an image's with its number."""
    numbers = iter(each["pixel_values"][::2, 0].tolist() if "pixel_values" in each else ())
    types = each.get("mm_token_type_ids", [0] * len(each["input_ids"]))
    return [(token, next(numbers) if of else None) for token, of in zip(each["input_ids"], types, strict=True)][:tokens]


@settings(max_examples=200)
@given(SAMPLES | SHOWN, st.integers(1, 5), st.integers(12, 40), st.sampled_from([0.0, 3.0]), st.integers(1, 40))
@example([sample([1, 1, 0], [1])] * 3, 2, 12, 0.0, 1)
@example(ON_ONE_RANK, 2, 18, 3.0, 1)
@example(IN_WAVES_WITHOUT_READS, 2, 12, 3.0, 1)
def test_assigned(samples: list[dict], ranks: int, token_cap: int, microbatch: float, tokens: int) -> None:
    """Every token of every sample is computed once in each tree that has it, within the limits and no image cut; no
    way is better.
    """
    cost = CostModel(quadratic=0.01, linear=1.0, microbatch=microbatch)
    lengths, floors = [len(each["input_ids"]) for each in samples], [floor_of(each) for each in samples]
    extra = [10.0 * floor for floor in floors]
    how = {"ranks": ranks, "token_cap": token_cap, "cost": cost, "extra": extra}
    with (
        mock.patch("odc_triton.plan.relatives.LEAST_SHARED", LEAST),
        mock.patch("odc_triton.plan.shared.LEAST_TOKENS", 2),
    ):
        relatives = find_relatives(samples)
        apart = shared(lengths, relatives, **how)
        over_ranks = shared(lengths, relatives, **how, tokens=tokens)

    def price(pack: list) -> float:
        segments = [each if isinstance(each, Segment) else Segment(each, 0, lengths[each]) for each in pack]
        assert sum(map(len, segments)) <= token_cap
        own = sum(0.01 * (each.stop**2 - each.start**2) + len(each) for each in segments)
        return microbatch + own + sum(extra[each.sample] for each in segments if each.start == 0)

    for made in (apart, over_ranks):
        assert relatives.floors == floors
        assert len(made.ready) == ranks
        real = max(sum(map(price, of_rank)) for of_rank in made.ready)
        assert made.estimate == pytest.approx(real) if made.split is None else made.estimate >= real * (1 - 1e-9)
        check_tokens(samples, floors, [each for of_rank in made.ready for pack in of_rank for each in pack])
    dense = assign(lengths, balance="mini", **how)
    alone = max(sum(map(price, packs)) for packs in dense)
    assert over_ranks.estimate <= apart.estimate * (1 + 1e-9)
    assert apart.estimate <= alone * (1 + 1e-9)
    assert apart.split is None
    if over_ranks.split is not None:
        assert max(over_ranks.split.tokens) <= tokens


def check_tokens(samples: list[dict], floors: list[int], entries: list) -> None:
    segments = [each for each in entries if isinstance(each, Segment)]
    ids = {each: samples[each.sample]["input_ids"] for each in segments}
    for segment, before in reads_of(segments).items():
        assert [read.high for read in before[-1:]] == [segment.start] * (segment.start > 0)
        read = [ids[read.holder][at] for read in before for at in range(read.low, read.high)]
        assert read == ids[segment][: segment.start]
        assert segment.start == 0 or segment.start >= floors[segment.sample]
        if segment.parent is not None:
            assert segment.start >= floors[segment.parent]
            assert contents(samples[segment.sample], segment.start) == contents(samples[segment.parent], segment.start)
    own = {each: (0, len(samples[each]["input_ids"])) for each in entries if isinstance(each, int)}
    for segment in sorted(segments, key=lambda each: each.start):
        first, end = own.get(segment.sample, (segment.start, segment.start))
        assert end == segment.start
        own[segment.sample] = first, segment.stop
    assert sorted(own) == list(range(len(samples)))
    assert all(end == len(samples[each]["input_ids"]) for each, (_, end) in own.items())


def test_a_group_over_the_cap() -> None:
    """Its prompt is computed once too. One that fits no wave is cut in samples, each of which computes it."""
    cost, samples = CostModel(quadratic=0.0, linear=1.0), [*group(1000, 250, 2), sample([7] * 50, [8] * 50)]
    lengths, relatives = [1250, 1250, 100], find_relatives(samples)
    how = {"token_cap": 1000, "cost": cost}
    made = shared(lengths, relatives, ranks=2, tokens=2000, **how)
    entries = [each for of_rank in made.ready for pack in of_rank for each in pack]
    assert sum(len(each) if isinstance(each, Segment) else lengths[each] for each in entries) == 1250 + 251 + 100
    small = how | {"token_cap": 700}
    with pytest.raises(ValueError, match=r"sample 0 has 1250 tokens, over the token_cap of 700, and can't be cut over"):
        shared(lengths, relatives, ranks=2, tokens=2000, **small)
    for limits, computed in ((how, 1601), (small, 2600)):
        within = Limits(ranks=2, token_cap=limits["token_cap"], split_tokens=2000)
        plan = make_plan(Samples.of(lengths, cost, prefixes=relatives), within)
        packs = [pack for rank in range(2) for pack in plan.packs(rank)]
        tokens = [sum(len(e) if isinstance(e, Segment) else lengths[e] for e in pack) for pack in packs]
        assert sum(tokens) == computed
        assert max(tokens) <= limits["token_cap"]
    with pytest.raises(ValueError, match="over the token_cap of 1000"):
        shared(lengths, relatives, ranks=2, **how)


def test_a_group_is_cut_over_ranks() -> None:
    """Neither rank computes the prompt again, and each takes half."""
    cost, samples = CostModel(quadratic=0.0, linear=1.0), group(1000, 250, 8)
    how = {"ranks": 2, "token_cap": 10_000, "cost": cost}
    lengths, relatives = [1250] * 8, find_relatives(samples)
    made = shared(lengths, relatives, **how, tokens=1000)
    assert made.estimate == pytest.approx((1000 + 8 * 250) / 2 / 0.95, rel=0.01)
    assert made.split.tokens == [999, 0]
    headless = shared(lengths, relatives, **how | {"cost": CostModel(quadratic=0.0, linear=1.0, head=0.5)}, tokens=1200)
    learned = [sum(min(len(each), each.stop - 999) for each in pack) for (pack,) in headless.ready]
    assert learned[0] + 999 / 2 == pytest.approx(learned[1], rel=0.01), "a prompt has no head"
    for tokens in (0, 998):  # too few
        assert shared(lengths, relatives, **how, tokens=tokens).split is None
    assert shared(lengths, relatives, **how, tokens=1000, split_cuts=0).split is None
    most = most_cuts(made.split)[0]
    assert shared(lengths, relatives, **how, tokens=1000, split_cuts=most).packs(0) == made.packs(0)
    for replicas, count in ((2, 2), (4, 0)):  # of four ranks
        made = shared(
            lengths * 2,
            find_relatives(samples + group(1001, 249, 8)),
            **how | {"ranks": 4},
            tokens=1100,
            replicas=replicas,
        )
        homes = (
            [
                {each.rank * replicas // 4 for each in made.split.segments if each.segment.sample // 8 == family}
                for family in range(2)
            ]
            if made.split
            else []
        )
        assert sorted(map(list, homes)) == [[0], [1]][:count]
        assert made.split is None or made.split.replicas == replicas, "a model with replicas refuses others"
    other = find_relatives([*samples[:-1], sample([1] + [1000] * 999, [7] * 250)])
    assert (
        shared(lengths, other, **how, tokens=1000).split.contents
        != shared(lengths, relatives, **how, tokens=1000).split.contents
    )


def group(prompt: int, answer: int, count: int) -> list[dict]:
    return [sample([prompt] * prompt, [prompt + 1 + n] * answer) for n in range(count)]


def test_a_group_is_cut_where_a_rank_would_wait() -> None:
    """One group on two ranks: each computes the prompt. Two groups: each rank one. Short prompts: as LB-Mini."""
    cost = CostModel(quadratic=0.0, linear=1.0)
    for samples, want in ((group(100, 50, 8), 100 + 4 * 50), (group(100, 50, 8) + group(101, 50, 8), 100 + 8 * 50)):
        lengths = [len(each["input_ids"]) for each in samples]
        made = shared(lengths, find_relatives(samples), ranks=2, token_cap=10_000, cost=cost)
        assert want <= made.estimate <= want + 10, "a branch computes the last shared token too"
    few = group(LEAST_SHARED - 1, 50, 4)
    made = shared([len(few[0]["input_ids"])] * 4, find_relatives(few), ranks=2, token_cap=10_000, cost=cost)
    assert not any(isinstance(each, Segment) for of_rank in made.ready for pack in of_rank for each in pack)


def test_tokens_that_are_learned_are_not_shared() -> None:
    samples = [{"input_ids": [7] * 100}] * 2
    assert find_relatives(samples).entries([0, 1]) == [0, 1]


def test_every_rank_gets_its_part_under_the_users_names() -> None:
    samples = group(100, 50, 8)
    lengths = [len(each["input_ids"]) for each in samples]
    names = range(100, 108)
    rows = Samples.of(lengths, CostModel.paper_7b(), names=names, prefixes=find_relatives(samples))
    both = [*map(make_plan(rows, Limits(ranks=2, token_cap=10_000)).packs, range(2))]
    entries = [each for packs in both for pack in packs for each in pack]
    assert sorted(each.sample if isinstance(each, Segment) else each for each in entries) == list(names)
    assert {each.parent for each in entries if isinstance(each, Segment)} - {None} <= set(names)
    assert sum(isinstance(each, Segment) and each.parent is not None for each in entries) == 6
    assert both[0].split is None


def test_a_branch_without_what_it_branches_off_is_refused() -> None:
    samples = group(100, 50, 3)
    for entries in (
        [Segment(1, 99, 150, 0)],
        [Segment(1, 99, 150, 0), 0],
        [Segment(0, 0, 150), Segment(2, 99, 150, 1)],
    ):
        (pack,) = pack_collate([PackedDataset(samples)[entries]])
        ends = pack["cu_seq_lens_q"].tolist()
        with pytest.raises(ValueError, match=r"branch from sample \d, and no segment here computes its token 98"):
            rows_before(ends, pack["segments"], plan=None, runs=[], window=None)


def test_wrong_relatives_are_refused() -> None:
    samples = group(100, 50, 3)
    relatives, how = find_relatives(samples), {"ranks": 2, "token_cap": 1000, "cost": CostModel.paper_7b()}
    with pytest.raises(ValueError, match="`relatives` is of 3 samples, and the lengths of these 3 are others"):
        shared([150, 150, 149], relatives, **how)
    with pytest.raises(ValueError, match="can't branch there: give another sample as parent"):
        Segment(1, 0, 50, 0)
    other = [samples[0], sample([7] * 100, [8] * 50), samples[2]]
    with pytest.raises(
        ValueError, match="pack 0: sample 1 branches from sample 0 at token 99, and their tokens before it differ"
    ):
        pack_collate([PackedDataset(other)[relatives.entries(range(3))]])
