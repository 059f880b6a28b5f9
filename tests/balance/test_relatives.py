"""Common prefixes in a data set: found bit by bit, among a minibatch's samples, kept together by the sampler."""

from __future__ import annotations

from itertools import groupby
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc_triton.balance import CostModel, MinibatchSampler
from odc_triton.plan.entries import Segment
from odc_triton.plan.order import Mix, in_families
from odc_triton.plan.relatives import Relatives, find_relatives
from tests.balance.test_shared import LEAST, SAMPLES, common, group, sample, shown


def fields(of: Relatives) -> list:
    return [of.lengths, of.order, of.place, of.shared.tolist(), of.free]


@given(SAMPLES, st.integers(1, 40), st.data())
def test_found_and_among(samples: list[dict], at_once: int, data: st.DataObject) -> None:
    """However many tokens are held at a time, the order is that of full samples, and that of a part the part's."""
    count = len(samples)
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    with (
        mock.patch("odc_triton.plan.relatives.LEAST_SHARED", LEAST),
        mock.patch("odc_triton.plan.relatives._COMPARED", at_once),
    ):
        relatives = find_relatives(samples)
        found = find_relatives([samples[at] for at in sorted(chosen)])
    ids = [each["input_ids"] for each in samples]
    assert relatives.order == sorted(range(count), key=ids.__getitem__)
    in_order = [ids[at] for at in relatives.order]
    assert relatives.shared.tolist() == [0, *map(common, in_order, in_order[1:])]
    assert fields(relatives.among(sorted(chosen))) == fields(found)
    part = relatives.among(chosen)
    assert part.lengths == [len(ids[at]) for at in chosen]
    assert part.contents == [relatives.contents[at] for at in chosen]
    assert [ids[chosen[at]] for at in part.order] == [ids[at] for at in sorted(chosen, key=ids.__getitem__)]
    assert [part.order[at] for at in part.place] == [*range(len(chosen))]


def test_progress_counts_the_samples_that_are_read() -> None:
    seen: list[int] = []
    find_relatives(group(100, 50, 8), seen.append)
    assert seen == [*range(1, 17)], "again, to tell other ranks what is shared"
    assert fields(find_relatives([])) == [[], [], [], [], []]


def families_of(samples: list[dict], **how: int) -> list[list[int]]:
    numbers = find_relatives(samples).family_numbers(**how)
    found: dict[int, list[int]] = {}
    for at, number in enumerate(numbers):
        found.setdefault(number, []).append(at)
    return sorted(found.values())


def test_families() -> None:
    """Common beginnings make no family, what is shared beyond them does; a large family is cut evenly."""
    alone = [sample([each] * 100, [1]) for each in (7, 8)]
    assert families_of([*alone, *group(50, 9, 3)], most=4, common=5) == [[0], [1], [2, 3, 4]]
    assert families_of(group(50, 9, 9), most=4, common=10) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    system = [9] * 60
    with_system = [sample(system + [prompt] * 40, [100 + n]) for prompt in (1, 2) for n in range(3)]
    assert families_of(with_system, most=3, common=6) == [[0, 1, 2], [3, 4, 5]]
    hardly = [sample(system + [prompt] * 20, [100 + n]) for prompt in (1, 2) for n in range(3)]
    assert families_of(hardly, most=3, common=6) == [[each] for each in range(6)]
    assert families_of([sample(system, [1])] * 5, most=3, common=5) == [[each] for each in range(5)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 8))
def test_an_order_in_families(family: list[int], most: int) -> None:
    order = [at for at in range(len(family)) if at % 5]
    found = in_families(order, family, most=most, seed="3")
    assert sorted(found) == order
    runs = [[*run] for _, run in groupby(found, key=family.__getitem__)]
    assert len(runs) == len({family[at] for at in order})
    for at, run in enumerate(runs):
        room = most - found.index(run[0]) % most
        assert len(run) <= room or all(len(later) > room for later in runs[at:]), "it waits if a later one fits"
    assert found == in_families(order, family, most=most, seed="3")


DATA = [each for prompt in range(40, 52) for each in group(prompt, 5 + prompt % 3, 4)]  # 12 families of 4
LENGTHS = [len(each["input_ids"]) for each in DATA]
RELATIVES = find_relatives(DATA)
COST = CostModel(quadratic=0.0, linear=1.0)


def sampler(**change) -> MinibatchSampler:
    usual = {"samples_per_rank": 4, "token_cap": 2000, "seed": 5, "rank": 0, "world": 2, "cost": COST}
    return MinibatchSampler(**{"lengths": LENGTHS, "relatives": RELATIVES, **usual, **change})


def entries(packs: list) -> list[Segment]:
    return [Segment(each, 0, LENGTHS[each]) if isinstance(each, int) else each for pack in packs for each in pack]


def minibatches(world: int = 2, **change) -> list[list[int]]:
    change = {"samples_per_rank": 8 // world, **change}
    ranks = [[*sampler(rank=rank, world=world, **change)] for rank in range(world)]
    return [sorted(each.sample for packs in of for each in entries(packs)) for of in zip(*ranks, strict=True)]


def test_families_meet_and_are_computed_once() -> None:
    found = minibatches()
    assert sorted(each for of in found for each in of) == [*range(48)]
    for of in found:  # two families fit a minibatch
        assert [each // 4 for each in of] == [of[0] // 4] * 4 + [of[-1] // 4] * 4
    packs = [each for of in sampler(world=1, samples_per_rank=8) for each in entries(of)]
    assert sum(len(each) for each in packs) == sum(LENGTHS) - sum(3 * (prompt - 1) for prompt in range(40, 52))
    for each in packs:
        assert each.stop == LENGTHS[each.sample]
        own, other = (DATA[of]["input_ids"] for of in (each.sample, each.sample if each.start == 0 else each.parent))
        assert own[: each.start] == other[: each.start]


def test_the_order_is_the_seeds_and_the_epochs_and_not_the_ranks() -> None:
    found = minibatches()
    assert found == minibatches(world=4) == minibatches(world=1) == minibatches(token_cap=70)
    assert found != minibatches(seed=6)
    assert found != minibatches(relatives=None)
    one = sampler(world=1, rank=0, samples_per_rank=8)
    epochs = [[sorted(each.sample for each in entries(packs)) for packs in one] for _ in range(2)]
    assert epochs[0] == found
    assert epochs[1] != found


def test_with_weights_drop_last_and_split() -> None:
    mix = Mix((16, 16), (1.5, 0.5))  # the first set has 32 numbers, of which 24 are taken
    data = DATA[:16] * 2 + DATA[16:32]
    how = {"lengths": [len(each["input_ids"]) for each in data], "relatives": find_relatives(data), "mix": mix}
    with_mix = sampler(**how, world=1, samples_per_rank=10, drop_last=True)
    assert len(with_mix) == 3
    for _ in range(2):
        packs = [[each for pack in of for each in pack] for of in with_mix]
        assert [len(of) for of in packs] == [10] * 3
        assert any(isinstance(each, Segment) for of in packs for each in of)
    assert minibatches(split=True) == minibatches()


def test_a_position_with_other_relatives_is_refused() -> None:
    for saved, here, words in (
        (RELATIVES, None, "saved with `relatives`, and this sampler has none"),
        (None, RELATIVES, "saved without `relatives`, and this sampler has some"),
        (
            RELATIVES,
            find_relatives([{"input_ids": each["input_ids"]} for each in DATA]),
            "saved with `relatives`, and this sampler has others",
        ),
    ):
        with pytest.raises(ValueError, match=f"{words}.*: resume with the same data set and `relatives`"):
            sampler(relatives=here).load_state_dict(sampler(relatives=saved).state_dict())


def test_refused() -> None:
    for balance in ("queue", "micro", "global", "local"):
        with pytest.raises(ValueError, match=f"`relatives` with balance '{balance}': .* balance 'mini'"):
            sampler(balance=balance)
    with pytest.raises(ValueError, match=r"`relatives` is of 47 samples, and the lengths of these 48 are others"):
        sampler(relatives=find_relatives(DATA[1:]))


def test_savings() -> None:
    cost = CostModel(quadratic=1.0, linear=2.0)
    samples = group(100, 50, 3)
    tokens, part = find_relatives(samples).savings(cost, token_cap=1000)
    assert (tokens, part) == (2 * 99, pytest.approx(2 * cost.sequence(99) / (3 * cost.sequence(150))))
    tokens, part = find_relatives(samples).savings(cost, token_cap=101)
    assert (tokens, part) == (2 * 99, pytest.approx(2 * cost.sequence(99) / (3 * cost.sequence(101))))
    assert find_relatives(samples).savings(cost, token_cap=100) == (0, 0)


PROMPT = [*range(10, 60)]


@pytest.mark.parametrize(
    ("other", "start"),
    [
        (shown(PROMPT, [7] * 5, [(40, 1)]), 49),
        (shown(PROMPT[:41], [7] * 5, [(40, 1)]), 0),  # branches off within the image's tokens
        (shown(PROMPT[:42], [7] * 5, [(40, 1)]), 41),
        (shown(PROMPT, [7] * 5, [(40, 2)]), 0),  # another image
        (shown(PROMPT, [7] * 5, [(45, 1)]), 0),
        (shown(PROMPT, [7] * 5), 0),
        (shown([*PROMPT[:40], 9, *PROMPT[41:]], [7] * 5), 0),  # the image's token, spelled
        (shown(PROMPT, [7] * 5, [(40, 1), (48, 1)]), 0),  # one more after what is shared
        (shown(PROMPT, [7] * 5, [(40, 1)], learned=20), 0),  # learned before the image
        (shown(PROMPT, [7] * 5, [(40, 1)], learned=5), 44),
    ],
)
def test_who_branches_off(other: dict, start: int) -> None:
    samples = [shown(PROMPT, [6] * 5, [(40, 1)]), other]
    relatives = find_relatives(samples)
    starts = [each.start for each in relatives.entries([0, 1]) if isinstance(each, Segment)]
    assert max(starts, default=0) == start


def test_the_plans_digest_has_the_images() -> None:
    """Else ranks that read other images would not notice."""
    pairs = [[shown(PROMPT, [answer] * 5, [(40, number)]) for answer in (6, 7)] for number in (1, 2)]
    one, other = map(find_relatives, pairs)
    assert one.shared.tolist() == other.shared.tolist() == [0, 50]
    assert not {*one.contents} & {*other.contents}


@pytest.mark.parametrize("change", ["bf16", "mask", "grid", "none"])
def test_all_fields_of_images_count(change: str) -> None:
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


def test_floors_of_a_part() -> None:
    samples = [{**shown(PROMPT, [5]), "token_type_ids": [1] * 51}, shown(PROMPT, [6], [(40, 1)])]
    relatives = find_relatives(samples)
    assert relatives.floors == [0, 41], "types of a text are not those of images"
    assert relatives.among([1, 0]).floors == [41, 0]
