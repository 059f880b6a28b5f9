"""Samples with pictures: not cut or branched off before their last picture's last token, and their cost is there."""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.balance import CostModel, MinibatchSampler, find_relatives
from odc_triton.balance.line import Strip, cut_line
from odc_triton.balance.pieces import Entry, Piece
from odc_triton.balance.queue import OwnCounter
from odc_triton.balance.relatives import floor_of
from odc_triton.balance.shared import assign_shared
from odc_triton.balance.split import assign_split, readable_tokens
from tests.balance.test_split import minibatches

FLAT = CostModel(quadratic=0.0, linear=1.0)
IGNORED = -100


def piece_of(each: Entry, lengths: list[int]) -> Piece:
    return each if isinstance(each, Piece) else Piece(each, 0, lengths[each])


def price(pack: list[Entry], lengths: list[int], extra: list[float], cost: CostModel) -> float:
    """By its definition: the extra cost is that of the piece that begins at 0."""
    pieces = [piece_of(each, lengths) for each in pack]
    own = sum(cost.sequence(each.stop) - cost.sequence(each.start) for each in pieces)
    return own + sum(extra[each.sample] for each in pieces if each.start == 0)


def check(packs_of_ranks: list[list[list[Entry]]], lengths: list[int], floors: list[int], token_cap: int) -> None:
    """Every token once, within the cap, and no piece begins within pictures."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for pack in chain.from_iterable(packs_of_ranks):
        pieces = [piece_of(each, lengths) for each in pack]
        assert 0 < sum(map(len, pieces)) <= token_cap
        for each in pieces:
            assert each.start == 0 or each.start >= floors[each.sample]
            spans.setdefault(each.sample, []).append((each.start, each.stop))
    assert sorted(spans) == [*range(len(lengths))]
    for sample, own in spans.items():
        own.sort()
        assert own[-1][1] == lengths[sample]
        assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])]


@st.composite
def with_pictures(draw: st.DrawFn) -> dict[str, Any]:
    found = draw(minibatches())
    lengths, cost = found["lengths"], found["cost"]
    floors = [draw(st.one_of(st.just(0), st.integers(1, length), st.just(min(length, 50)))) for length in lengths]
    most = draw(st.sampled_from([0.1, 1.0, 5.0])) * cost.sequence(max(lengths))
    return found | {"floors": floors, "extra": [draw(st.floats(0, most)) if floor else 0.0 for floor in floors]}


@settings(deadline=None)
@given(with_pictures(), st.sampled_from([1, 1, 2]))
def test_split(given: dict, replicas: int) -> None:
    lengths, floors, extra, cap, cost = (given[name] for name in ("lengths", "floors", "extra", "token_cap", "cost"))
    shards = given["ranks"]
    given |= {"ranks": shards * replicas, "replicas": replicas}
    try:
        deal = assign_split(**given)
    except ValueError as error:
        found = re.search(
            r"sample (\d+) has \d+ tokens, over the token_cap of .* sample(.*first (\d+), can't be cut)?$", str(error)
        )
        assert lengths[int(found[1])] > cap
        assert int(found[3] or 0) == floors[int(found[1])]
        over = [at for at, length in enumerate(lengths) if length > cap]
        if all(floors[at] <= cap and lengths[at] - floors[at] <= cap * (shards - 1) for at in over):
            assign_split(**given | {"tokens": sum(lengths)})  # only the tokens to read are missing
        return
    dealt = [deal.packs(rank) for rank in range(given["ranks"])]
    check(dealt, lengths, floors, cap)
    for rank, packs in enumerate(dealt):
        prices = [price(pack, lengths, extra, cost) for pack in packs[len(deal.waves_of(rank)) :]]
        assert prices == sorted(prices, reverse=True), "costliest first"
        pieces = [each for pack in packs for each in pack if isinstance(each, Piece)]
        assert sum(len(each) for each in pieces if each.stop < lengths[each.sample]) <= given["tokens"]
    real = [sum(price(pack, lengths, extra, cost) for pack in packs) for packs in dealt]
    assert deal.estimate >= max(real) * (1 - 1e-9)
    if deal.plan is None:
        least = max(sum(real) / given["ranks"], *map(cost.sequence, lengths))
        assert deal.estimate >= least * (1 - 1e-9)


def test_a_line_is_cut_by_the_cost_of_pictures_and_after_them() -> None:
    """The first 100 tokens cost 500 more; so do the other 500."""
    strip = Strip(0, 0, 600, floor=100, extra=500.0)
    halves = [[Piece(0, 0, 300)], [Piece(0, 300, 600)]]
    assert cut_line([strip], [8.0, 3.0], FLAT) == halves
    assert cut_line([strip], [1.0, 1.0], None) == halves, "of tokens"
    for shares in ([1.0, 1.2], [4.0, 7.0]):
        assert cut_line([strip], shares, FLAT) == [[Piece(0, 0, 100)], [Piece(0, 100, 600)]], "at the floor"
    assert cut_line([strip], [1.0, 9.0], FLAT) == [[], [0]]
    late = strip._replace(floor=580)
    assert cut_line([late], [9.0, 1.0], FLAT) == [[Piece(0, 0, 580)], [Piece(0, 580, 600)]], "few tokens are left"
    two = cut_line([strip, Strip(1, 0, 1100)], [1.0, 1.0], FLAT)
    assert two == [[0], [1]], "what comes after is further on"


def test_ranks_make_up_for_pictures() -> None:
    """A sample of 1000 tokens whose pictures cost as much, and one of 1000: 1500 for each rank."""
    how = {"ranks": 2, "token_cap": 2000, "cost": FLAT, "tokens": 1000}
    deal = assign_split([1000, 1000], **how, extra=[0.0, 1000.0], floors=[0, 10])
    assert deal.estimate == 1500


@pytest.mark.parametrize(
    ("length", "floor", "tokens", "message"),
    [
        (400, 100, 400, None),
        (385, 85, 400, None),
        (110, 100, 400, None),
        (400, 0, 400, None),
        (330, 101, 400, "; the tokens of its pictures, within the first 101, can't be cut"),
        (
            391,
            91,
            50,
            "others may read 50 tokens .* need 98: .*; the tokens of its pictures, within the first 91, can't",
        ),
        (400, 0, 50, r"need 100: raise the cap or the tokens to read, or truncate or drop the sample$"),
    ],
)
def test_samples_over_the_cap(length: int, floor: int, tokens: int, message: str | None) -> None:
    how = {"ranks": 4, "token_cap": 100, "tokens": tokens, "cost": CostModel(quadratic=1.0, linear=1.0)}
    how |= {"floors": [0, floor]}
    if message is None:
        deal = assign_split([9, length], **how)
        check([deal.packs(rank) for rank in range(4)], [9, length], [0, floor], 100)
    else:
        with pytest.raises(ValueError, match=f"sample 7 has {length} tokens, over the token_cap of 100, .*{message}"):
            assign_split([9, length], **how, names=[6, 7])


def test_the_sample_that_does_not_fit_is_named() -> None:
    how = {"ranks": 4, "token_cap": 100, "tokens": 400, "cost": FLAT, "floors": [100, 101, 99]}
    with pytest.raises(ValueError, match=r"sample 1 has 380 tokens, .* within the first 101, can't be cut"):
        assign_split([390, 380, 370], **how)
    deal = assign_split([390, 380, 370], **how | {"floors": [100, 100, 99]})
    check([deal.packs(rank) for rank in range(4)], [390, 380, 370], [100, 100, 99], 100)


def test_replicas_share_the_samples_over_the_cap() -> None:
    """By cost one replica would get three of them, and one whole sample with pictures the other."""
    how = {"ranks": 4, "replicas": 2, "token_cap": 100, "tokens": 200, "cost": FLAT}
    deal = assign_split([200] * 4 + [50], **how, extra=[0.0] * 4 + [350.0])
    check([deal.packs(rank) for rank in range(4)], [200] * 4 + [50], [0] * 5, 100)


def test_readable_tokens_are_enough_for_long_pictures() -> None:
    lengths, floors = [190, 180, 110], [95, 98, 100]
    how = {"ranks": 4, "token_cap": 100, "cost": FLAT, "floors": floors}
    tokens = readable_tokens(lengths, samples=3, **how)
    assert tokens >= 95 + 98 + 100
    deal = assign_split(lengths, **how, tokens=tokens)
    check([deal.packs(rank) for rank in range(4)], lengths, floors, 100)


@pytest.mark.parametrize("floors", [[3], [3, 8], [-1, 3], [3, 3, 3]])
def test_floors_that_do_not_fit_are_refused(floors: list[int]) -> None:
    for call in (
        partial(MinibatchSampler, [9, 7], 1, 9, rank=0, world=1),
        partial(assign_split, [9, 7], ranks=2, token_cap=9, tokens=9, cost=FLAT),
    ):
        with pytest.raises(ValueError, match="extra has 3 costs for 2 samples"):
            call(extra=[1.0] * 3)
        with pytest.raises(
            ValueError, match=rf"of {len(floors)} floors for 2 samples one is .* up to its last picture's"
        ):
            call(floors=floors)


# ---------------------------------------------------------------- samples that share


def shown(prompt: list[int], answer: list[int], pictures: list[tuple[int, int]] = (), learned: int = 0) -> dict:
    """`pictures`: (place, number), the number a picture's content; its token is 9, at that place of all tokens."""
    ids = prompt + answer
    sample: dict[str, Any] = {"labels": [IGNORED] * (len(prompt) - learned) + ids[len(prompt) - learned :]}
    if pictures:
        places = [place for place, _ in pictures]
        ids = [9 if at in places else token for at, token in enumerate(ids)]
        values = [np.full((2, 3), number, dtype=np.float32) for _, number in pictures]
        sample |= {"pixel_values": np.concatenate(values), "image_grid_thw": np.array([[1, 1, 2]] * len(pictures))}
        sample["mm_token_type_ids"] = [int(at in places) for at in range(len(ids))]
    return sample | {"input_ids": ids}


_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
_PICTURES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1)), max_size=2, unique_by=lambda it: it[0]).map(
    sorted
)


@st.composite
def samples_with_pictures(draw: st.DrawFn) -> list[dict]:
    made = []
    for _ in range(draw(st.integers(1, 10))):
        prompt, answer = draw(_TOKENS), draw(_TOKENS)
        pictures = [each for each in draw(_PICTURES) if each[0] < len(prompt) + len(answer)]
        made.append(shown(prompt, answer, pictures))
    return made


def contents(sample: dict, tokens: int) -> list:
    """The first tokens, a picture's with its number."""
    numbers = iter(sample["pixel_values"][::2, 0].tolist() if "pixel_values" in sample else ())
    types = sample.get("mm_token_type_ids", [0] * tokens)
    return [(token, next(numbers) if of else None) for token, of in zip(sample["input_ids"], types, strict=False)][
        :tokens
    ]


@settings(deadline=None)
@given(samples_with_pictures(), st.integers(1, 4), st.sampled_from([0, 10, 40]))
def test_shared(samples: list[dict], ranks: int, tokens: int) -> None:
    """A branch begins after the last picture of both, and all before it is the same, pictures too."""
    lengths = [len(each["input_ids"]) for each in samples]
    floors = [floor_of(each) for each in samples]
    extra = [10.0 * floor for floor in floors]
    cost = CostModel(quadratic=0.01, linear=1.0)
    with (
        mock.patch("odc_triton.balance.relatives.LEAST_SHARED", 2),
        mock.patch("odc_triton.balance.shared.LEAST_TOKENS", 2),
    ):
        relatives = find_relatives(samples)
        made = assign_shared(
            lengths,
            relatives,
            ranks=ranks,
            token_cap=30,
            cost=cost,
            tokens=tokens,
            extra=extra,
        )
        joint = relatives.entries(range(len(samples)))
    assert relatives.floors == floors
    for each in [*joint, *chain.from_iterable(chain.from_iterable(made.packs))]:
        if isinstance(each, Piece) and each.start:
            assert each.start >= floors[each.sample]
        if isinstance(each, Piece) and each.parent is not None:
            assert each.start >= floors[each.parent]
            assert contents(samples[each.sample], each.start) == contents(samples[each.parent], each.start)
    real = [sum(price(pack, lengths, extra, cost) for pack in packs) for packs in made.packs]
    assert made.estimate >= max(real) * (1 - 1e-9)
    if made.plan is None:
        assert made.estimate == pytest.approx(max(real))


PROMPT = [*range(10, 60)]


@pytest.mark.parametrize(
    ("other", "start"),
    [
        (shown(PROMPT, [7] * 5, [(40, 1)]), 49),
        (shown(PROMPT[:41], [7] * 5, [(40, 1)]), 0),  # branches off within the picture's tokens
        (shown(PROMPT[:42], [7] * 5, [(40, 1)]), 41),
        (shown(PROMPT, [7] * 5, [(40, 2)]), 0),  # another picture
        (shown(PROMPT, [7] * 5, [(45, 1)]), 0),
        (shown(PROMPT, [7] * 5), 0),
        (shown([*PROMPT[:40], 9, *PROMPT[41:]], [7] * 5), 0),  # the picture's token, spelled
        (shown(PROMPT, [7] * 5, [(40, 1), (48, 1)]), 0),  # one more after what is shared
        (shown(PROMPT, [7] * 5, [(40, 1)], learned=20), 0),  # learned before the picture
        (shown(PROMPT, [7] * 5, [(40, 1)], learned=5), 44),
    ],
)
def test_who_branches_off(other: dict, start: int) -> None:
    samples = [shown(PROMPT, [6] * 5, [(40, 1)]), other]
    relatives = find_relatives(samples)
    starts = [each.start for each in relatives.entries([0, 1]) if isinstance(each, Piece)]
    assert max(starts, default=0) == start


def test_the_plans_digest_has_the_pictures() -> None:
    """Else ranks that read other pictures would not notice."""
    pairs = [[shown(PROMPT, [answer] * 5, [(40, number)]) for answer in (6, 7)] for number in (1, 2)]
    one, other = map(find_relatives, pairs)
    assert one.shared.tolist() == other.shared.tolist() == [0, 50]
    assert not {*one.contents} & {*other.contents}


@pytest.mark.parametrize("change", ["bf16", "mask", "grid", "none"])
def test_all_fields_of_pictures_count(change: str) -> None:
    def made(answer: int, changed: bool) -> dict:
        each = {**shown(PROMPT, [answer] * 5, [(40, 1)]), "token_type_ids": None}
        each["token_type_ids"] = each.pop("mm_token_type_ids")  # as Gemma3's processor calls it
        values = torch.tensor(each["pixel_values"])
        if change == "bf16":
            values = values.bfloat16() + changed
        if change == "grid":
            each["image_grid_thw"] = torch.tensor([[1, 2, 1] if changed else [1, 1, 2]])
        if change == "mask":
            each["pixel_attention_mask"] = np.full((1, 2), int(changed))
        return each | {"pixel_values": values}

    alike, differ = (find_relatives([made(6, False), made(7, changed)]) for changed in (False, True))
    assert alike.shared.tolist() == [0, 50]
    assert differ.shared[1] == (50 if change == "none" else 0)


@pytest.mark.parametrize("balance", ["mini", "queue"])
def test_the_sampler_gives_each_sample_its_own(balance: str) -> None:
    """Minibatches are shuffled: by its number in the data set each sample has its cost and its floor."""
    lengths = [200 + at for at in range(12)]
    floors = [at * 10 if at % 3 else 0 for at in range(12)]
    extra = [50.0 * floor for floor in floors]
    how = {"token_cap": 150, "cost": FLAT}
    given = {"split": True, "floors": floors, "extra": extra, "counter": OwnCounter()}
    samplers = [MinibatchSampler(lengths, 1, rank=rank, world=4, balance=balance, **how, **given) for rank in range(4)]
    order = samplers[0]._order(0)
    for number, of_ranks in enumerate(zip(*samplers, strict=True)):
        names = order[4 * number : 4 * number + 4]
        own = [[of[name] for name in names] for of in (lengths, floors, extra)]
        limits = {"ranks": 4, "tokens": samplers[0].split_tokens, "names": names, "ride": balance == "mini"}
        deal = assign_split(own[0], floors=own[1], extra=own[2], **how, **limits)
        assert deal.plan.digest == of_ranks[0].split.digest
        found = of_ranks if balance == "mini" else of_ranks[0].waves
        assert [*found] == [deal.packs(rank) for rank in range(4)]


def test_the_sampler_takes_floors_from_relatives() -> None:
    samples = [shown(PROMPT, [answer] * 5, [(40, 1)]) for answer in (6, 7)]
    relatives, lengths = find_relatives(samples), [55, 55]
    how = {"samples_per_rank": 2, "token_cap": 200, "rank": 0, "world": 1, "relatives": relatives}
    assert MinibatchSampler(lengths, **how).assigner.floors == [41, 41]
    ((pack,),) = MinibatchSampler(lengths, **how, floors=[41, 41], extra=[1.0, 1.0])
    assert pack == [Piece(0, 0, 55), Piece(1, 49, 55, 0)]
    with pytest.raises(ValueError, match="relatives are of samples with other floors"):
        MinibatchSampler(lengths, **how, floors=[40, 41])


def test_relatives_of_a_part_and_wrong_costs() -> None:
    samples = [{**shown(PROMPT, [5]), "token_type_ids": [1] * 51}, shown(PROMPT, [6], [(40, 1)])]
    relatives = find_relatives(samples)
    assert relatives.floors == [0, 41], "types of a text are not those of pictures"
    assert relatives.among([1, 0]).floors == [41, 0]
    with pytest.raises(ValueError, match="extra has 1 costs for 2 samples"):
        assign_shared([51, 51], relatives, ranks=1, token_cap=200, cost=FLAT, extra=[1.0])
