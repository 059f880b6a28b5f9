"""What samplers and loaders make of plans of split sequences: one plan on all ranks, and every target once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from odc_triton.balance import (
    CostModel,
    MinibatchSampler,
    PackedDataset,
    count_target_tokens,
    find_relatives,
    pack_collate,
)
from odc_triton.plan.entries import Entry, Segment
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.plan.queue import OwnCounter
from odc_triton.plan.segments import SplitPlan
from tests.balance.test_relatives import PROMPT
from tests.balance.test_shared import shown
from tests.support.planned import split

COST, IGNORED = CostModel.paper_7b(), -100
LENGTHS = [4000, 300, 20, 3500, 80, 500, 30, 60, 3900, 2, 1500, 100]


class Samples:
    """Of each token its sample's number and its place can be read; a third of a sample is not learned."""

    def __getitem__(self, index: int) -> dict:
        ids = torch.arange(LENGTHS[index]) + 10_000 * index
        labels = ids.clone()
        labels[: LENGTHS[index] // 3] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def __len__(self) -> int:
        return len(LENGTHS)


DATA = PackedDataset(Samples())


def samplers(world: int = 2, **options: Any) -> list[MinibatchSampler]:
    options = {"samples_per_rank": 2, "token_cap": 4096, "split": True, "cost": COST} | options
    return [MinibatchSampler(**{"lengths": LENGTHS, "rank": rank, "world": world} | options) for rank in range(world)]


def targets(packs: list[list[Entry]]) -> int:
    return count_target_tokens(pack_collate(DATA.__getitems__(packs)))


@pytest.mark.parametrize(("world", "replicas", "workers"), [(2, 1, 0), (2, 1, 2), (4, 2, 0)])
def test_loaders_keep_plan_and_targets(world: int, replicas: int, workers: int) -> None:
    own, planned = samplers(world, replicas=replicas), samplers(world, replicas=replicas)
    options = {"collate_fn": pack_collate, "num_workers": workers}
    loaders = [DataLoader(DATA, batch_sampler=each, **options) for each in own]
    were_split, seen, learned = 0, [], 0
    for minibatch, entries in zip(zip(*loaders, strict=True), zip(*planned, strict=True), strict=True):
        plan = SplitPlan.of(entries, replicas=replicas)
        were_split += plan is not None
        assert all(isinstance(packs, MinibatchPacks) for packs in minibatch)
        for packs in minibatch:
            assert (packs.split and (packs.split.digest, packs.split.replicas)) == (plan and (plan.digest, replicas))
        learned += sum(map(count_target_tokens, minibatch))
        for pack in (pack for packs in minibatch for pack in packs):
            seen += pack["input_ids"][0].tolist()
        for pack in (pack for packs in minibatch for pack in packs if "segments" in pack):
            ids, shifted, positions = (pack[name][0] for name in ("input_ids", "shift_labels", "position_ids"))
            assert torch.equal(ids, ids // 10_000 * 10_000 + positions)
            known = shifted != IGNORED
            assert torch.equal(shifted[known], ids[known] + 1), "a segment's last position predicts the next segment"
            assert torch.equal(known.nonzero().flatten(), pack["target_positions"])
            starts = positions[pack["cu_seq_lens_q"][:-1].long()].tolist()
            assert starts == [0 if each is None else each.start for each in pack["segments"]]
    assert were_split
    assert sorted(seen) == [10_000 * at + place for at, length in enumerate(LENGTHS) for place in range(length)]
    assert learned == sum(targets([[at]]) for at in range(len(LENGTHS)))
    resumed = samplers(world, replicas=world)[0]  # a position means the same with other replicas, and without a split
    for state in (samplers(world, replicas=replicas)[0], samplers(world, split=False)[0]):
        resumed.load_state_dict(state.state_dict(minibatches_done=1))
        assert resumed.minibatch == 1


def test_the_number_of_readable_tokens() -> None:
    assert {each.split_tokens for each in samplers(split=700)} == {700}
    assert 2000 < samplers()[0].split_tokens < 2300
    for options, message in (
        ({"balance": "micro"}, "split is True with balance 'micro'"),
        ({"world": 4, "token_cap": 1900, "replicas": 2}, r"lengths\[0\] is 4000 tokens, over the 3800 of 2 ranks"),
        ({"world": 4, "replicas": 3}, "replicas is 3: give a divisor of the world of 4 ranks"),
        ({"floors": [1]}, "one of 1 `floors` for 12 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            samplers(**options)


@pytest.mark.parametrize("balance", ["mini", "queue"])
def test_a_sample_that_cannot_be_cut_is_named_by_its_place_in_the_data_set(balance: str) -> None:
    one, _ = samplers(balance=balance, token_cap=3600, split=100, counter=OwnCounter())
    with pytest.raises(ValueError, match=r"sample [08] has \d+ tokens, over the token_cap of 3600"):
        list(one)


def test_small_samples_share_a_pack_by_what_waves_cost_too() -> None:
    """Together they are little beside a rank's wave; each alone would be one more microbatch."""
    counter = OwnCounter()
    (queued,) = MinibatchSampler([4000, *[10] * 8], 5, 4096, "queue", rank=0, world=2, counter=counter, split=True)
    assert queued.split.lengths.keys() == {0}
    assert len(queued.packs) == 1


def test_a_pack_of_segments_has_no_labels_and_survives_a_pickle() -> None:
    (pack,) = pickle.loads(pickle.dumps(pack_collate(DATA.__getitems__(MinibatchPacks([[Segment(0, 5, 90), 2]])))))
    assert pack["segments"] == (Segment(0, 5, 90), None)
    assert "labels" not in pack
    with pytest.raises(ValueError, match=r"pack 0, sample 0: tokens 5\.\.4000 of sample 0 are beyond its 4000 tokens"):
        pack_collate(DATA.__getitems__([[Segment(0, 5, 4001)]]))


@pytest.mark.parametrize("balance", ["mini", "queue"])
def test_each_sample_has_its_own_floor_and_cost(balance: str) -> None:
    """Minibatches are shuffled: by its number in the data set each sample has its cost and its floor."""
    lengths = [200 + at for at in range(12)]
    floors = [at * 10 if at % 3 else 0 for at in range(12)]
    extra = [50.0 * floor for floor in floors]
    how = {"token_cap": 150, "cost": CostModel(quadratic=0.0, linear=1.0)}
    given = {"split": True, "floors": floors, "extra": extra, "counter": OwnCounter()}
    samplers = [MinibatchSampler(lengths, 1, rank=rank, world=4, balance=balance, **how, **given) for rank in range(4)]
    order = samplers[0]._order(0)
    for number, of_ranks in enumerate(zip(*samplers, strict=True)):
        names = order[4 * number : 4 * number + 4]
        own = [[of[name] for name in names] for of in (lengths, floors, extra)]
        limits = {"ranks": 4, "tokens": samplers[0].split_tokens, "names": names, "ride": balance == "mini"}
        deal = split(own[0], floors=own[1], extra=own[2], **how, **limits)
        assert deal.split.digest == of_ranks[0].split.digest
        found = of_ranks if balance == "mini" else [[*filter(None, own)] for own in of_ranks[0].waves]
        assert [*found] == [deal.packs(rank) for rank in range(4)]


def test_floors_are_those_of_relatives() -> None:
    relatives, lengths = find_relatives([shown(PROMPT, [answer] * 5, [(40, 1)]) for answer in (6, 7)]), [55, 55]
    how = {"samples_per_rank": 2, "token_cap": 200, "rank": 0, "world": 1, "relatives": relatives, "cost": COST}
    assert MinibatchSampler(lengths, **how)._samples.earliest_cuts == [41, 41]
    ((pack,),) = MinibatchSampler(lengths, **how, floors=[41, 41], extra=[1.0, 1.0])
    assert pack == [Segment(0, 0, 55), Segment(1, 49, 55, 0)]
    with pytest.raises(ValueError, match="`relatives` is of samples with other `floors`"):
        MinibatchSampler(lengths, **how, floors=[40, 41])
