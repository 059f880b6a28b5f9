"""MinibatchSampler: the same samples whatever the assignment, and a position that can be saved."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from odc_triton.balance import BALANCES, CostModel, MinibatchSampler, assign
from odc_triton.plan.order import Mix
from odc_triton.plan.queue import OwnCounter

LENGTHS = [random.Random(i).randint(1, 100) for i in range(50)]


def sampler(**change) -> MinibatchSampler:
    arguments = {"lengths": LENGTHS, "samples_per_rank": 4, "token_cap": 150, "seed": 5, "rank": 0, "world": 2}
    return MinibatchSampler(**{**arguments, **change})


def samples(packs) -> list[int]:
    return [i for members in packs for i in members]


def epoch_of(**change) -> list[list[int]]:
    """The sorted samples of each minibatch of one epoch, over all ranks."""
    world = change.get("world", 2)
    per_rank = [list(sampler(**change, rank=rank)) for rank in range(world)]
    return [sorted(i for packs in dealt for i in samples(packs)) for dealt in zip(*per_rank, strict=True)]


def test_ranks_agree_without_communication_and_cover_the_epoch_once():
    minibatches = epoch_of()
    assert len(minibatches) == len(sampler()) == 7
    assert sorted(i for minibatch in minibatches for i in minibatch) == list(range(50))
    assert [len(m) for m in minibatches] == [8] * 6 + [2]


def test_the_dealing_is_that_of_assign_over_the_minibatch():
    """One minibatch of all samples, in the shuffled order that a sampler of one sample a minibatch shows."""
    cost = CostModel(quadratic=1.0, linear=1.0)
    order = [i for packs in sampler(samples_per_rank=1, world=1) for i in samples(packs)]
    expected = assign([LENGTHS[i] for i in order], ranks=3, token_cap=150, balance="mini", cost=cost)
    expected = [[[order[i] for i in members] for members in packs] for packs in expected]
    whole = {"samples_per_rank": 17, "world": 3, "cost": cost}
    assert [next(iter(sampler(**whole, rank=rank))) for rank in range(3)] == expected


def test_a_minibatchs_samples_depend_neither_on_balance_nor_on_how_the_ranks_split_them():
    reference = epoch_of()
    for balance in BALANCES:
        assert epoch_of(balance=balance) == reference
    assert epoch_of(world=4, samples_per_rank=2) == reference
    assert epoch_of(world=1, samples_per_rank=8) == reference
    assert epoch_of(world=8, samples_per_rank=1) == reference


def test_the_shuffle_depends_on_seed_and_epoch():
    one = sampler()
    assert one.state_dict() == sampler(mix=Mix((50,))).state_dict()
    assert one.state_dict().keys() == {"epoch", "minibatch", "seed", "samples", "samples_per_minibatch"}
    assert list(one) == list(sampler())
    assert list(one) != list(sampler())  # the second iteration is the next epoch
    assert list(sampler(seed=6)) != list(sampler())
    again = sampler()
    again.set_epoch(1)
    other = sampler()
    list(other)
    assert list(again) == list(other)


MIX = Mix((20, 10), (0.5, 3.0))


def mixed(**change) -> MinibatchSampler:
    return sampler(**{"mix": MIX} | change)


@pytest.mark.parametrize("sampler", [sampler, mixed])
@pytest.mark.parametrize("stop", [0, 3, 6, 7, 9])
def test_a_saved_position_resumes_where_training_was(stop, sampler):
    def two_epochs(of):
        while of.epoch < 2:
            yield from of

    expected = list(two_epochs(sampler()))
    first = sampler()
    seen = list(itertools.islice(two_epochs(first), stop))
    state = json.loads(json.dumps(first.state_dict()))
    list(two_epochs(first))
    assert first.epoch == 2
    # A loader's sampler is ahead of training, in any epoch.
    assert state == first.state_dict(minibatches_done=stop) == sampler().state_dict(minibatches_done=stop)
    resumed = sampler(seed=99)
    resumed.load_state_dict(state)
    assert seen + list(two_epochs(resumed)) == expected
    other = sampler(world=4, samples_per_rank=2)
    other.load_state_dict(state)
    assert (other.epoch, other.minibatch) == (state["epoch"], state["minibatch"])


def test_set_epoch_stays_within_the_current_epoch_so_that_a_resumed_loop_goes_on():
    one = sampler()
    one.load_state_dict(sampler().state_dict(minibatches_done=10))
    assert (one.epoch, one.minibatch) == (1, 3)
    one.set_epoch(1)
    assert one.minibatch == 3
    assert len(list(one)) == 4
    one.set_epoch(5)
    assert (one.epoch, one.minibatch) == (5, 0)
    with pytest.raises(ValueError, match="epoch is -1"):
        one.set_epoch(-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 49}, "saved with samples 49, here it is 50"),
        ({"samples_per_minibatch": 6}, "saved with samples_per_minibatch 6, here it is 8"),
        ({"minibatch": 7}, "epoch 0, minibatch 7, but an epoch has 7"),
        ({"epoch": -1}, "epoch -1"),
        ({"rank": 0}, "state has keys"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, message):
    one = sampler()
    with pytest.raises(ValueError, match=message):
        one.load_state_dict({**one.state_dict(), **change})
    assert (one.epoch, one.minibatch, one.seed) == (0, 0, 5)


def test_drop_last_leaves_out_the_last_minibatch_only():
    assert epoch_of(drop_last=True) == epoch_of()[:-1]
    assert len(sampler(drop_last=True)) == 6


def test_a_last_minibatch_that_ranks_cannot_share_is_refused_at_once_except_under_mini():
    for balance in ("micro", "global", "local"):
        with pytest.raises(ValueError, match=r"50 samples leave 2 over on 4 ranks .*drop_last=True"):
            sampler(balance=balance, world=4)
        assert len(sampler(balance=balance, world=4, drop_last=True)) == 3
    assert len(sampler(balance="mini", world=4)) == 4


def test_rank_and_world_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = MinibatchSampler(LENGTHS, 4, 150)
    assert (alone.rank, alone.world) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    third = MinibatchSampler(LENGTHS, 4, 150)
    assert (third.rank, third.world) == (2, 3)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="RANK is 'two'"):
        MinibatchSampler(LENGTHS, 4, 150)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [5, 151]}, r"lengths\[1\] is 151 tokens, over the token_cap of 150"),
        ({"samples_per_rank": 0}, "samples_per_rank is 0"),
        ({"balance": "best"}, "balance is 'best'"),
        ({"world": 0}, "world is 0"),
        ({"replicas": 2.0}, "replicas is 2.0: give a divisor of the world of 2 ranks"),
        ({"replicas": 2, "split": True, "balance": "queue"}, "balance 'queue' can't split sequences with 2 replicas"),
        ({"rank": 2}, "rank is 2, outside a world of 2"),
        ({"rank": -1}, "rank is -1, outside a world of 2"),
        ({"samples_per_rank": 26, "drop_last": True}, "50 samples do not fill one minibatch of 52"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        sampler(**change)


def test_with_weights_every_epoch_has_as_many_samples_of_each_set():
    assert MIX.numbers == len(LENGTHS)
    one, epochs = mixed(world=1, samples_per_rank=8), []
    for _ in range(4):
        assert len(one) == 5
        epochs.append([i for packs in one for i in samples(packs)])
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 40
        assert sorted(i for i in epoch if i >= 20) == list(range(20, 50))
    assert sorted(i for epoch in epochs[:2] for i in epoch if i < 20) == list(range(20))
    assert mixed(drop_last=True).state_dict()["samples"] == 50


def test_with_other_weights_a_saved_position_is_refused():
    state = mixed().state_dict()
    with pytest.raises(ValueError, match=r"saved with taken \[10, 30\], here it is \[20, 30\]"):
        mixed(mix=Mix((20, 10), (1.0, 3.0))).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved with sets \[20, 10\], here it is \[30, 20\]"):
        mixed(mix=Mix((30, 20))).load_state_dict(state)
    with pytest.raises(ValueError, match="state has keys"):
        sampler().load_state_dict(state)
    with pytest.raises(ValueError, match="mix numbers 30 samples and there are 50 lengths"):
        mixed(mix=Mix((20, 10)))


@pytest.mark.parametrize("balance", ["mini", "queue"])
def test_extra_costs_are_those_of_the_data_sets_samples(balance):
    """One sample of 8 costs as much as all others: it is alone on its rank, or taken first, alone."""
    lengths, extra = [100] * 16, [0.0] * 16
    cost = CostModel.paper_7b()
    extra[5] = 7 * cost.sequence(100)
    seen, given = 0, {"world": 2, "cost": cost, "counter": OwnCounter()}
    for rank in range(2):
        sampler = MinibatchSampler(
            lengths, 4, 1000, balance, rank=rank, extra=extra, **given | {"counter": OwnCounter()}
        )
        for packs in sampler:
            own = packs.packs if balance == "queue" else packs
            if any(5 in pack for pack in own):
                seen += 1
                assert own[: None if balance == "mini" else 1] == [[5]]
    assert seen == (2 if balance == "queue" else 1)
    with pytest.raises(ValueError, match="extra has 15 costs for 16 samples"):
        MinibatchSampler(lengths, 4, 1000, rank=0, extra=extra[1:], **given)
    with pytest.raises(ValueError, match="extra is given without cost"):
        MinibatchSampler(lengths, 4, 1000, rank=0, world=2, extra=extra)
    for split in (0.4, -5):
        with pytest.raises(ValueError, match=f"split is {split}: give True, or the tokens"):
            MinibatchSampler(lengths, 4, 1000, rank=0, world=2, split=split)
