"""Several data sets with weights: what each epoch takes, in which order, and the data sets as one."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.jobs.data.dataset import mixture, split_samples
from odc_triton.plan.order import Mix, shuffled
from tests.support.records import samples_of, tokenized


def taken(mix: Mix, epoch: int, seed: str = "5") -> list[Counter[int]]:
    """By set: how often an epoch takes each sample, whatever its copy."""
    begins = [0, *accumulate(size * n for size, n in zip(mix.sizes, mix.copies, strict=True))]
    order = np.array(mix.order(epoch, seed))
    assert len(set(order.tolist())) == len(order) == len(mix), "no number comes twice"
    assert order.min() >= 0
    assert order.max() < mix.numbers == begins[-1]
    sets = zip(mix.sizes, begins[:-1], begins[1:], strict=True)
    return [Counter(((order[(order >= begin) & (order < end)] - begin) % size).tolist()) for size, begin, end in sets]


def test_one_set_is_in_the_order_that_saved_runs_have():
    for epoch in range(3):
        assert Mix((50,)).order(epoch, "5") == shuffled(50, f"5 {epoch}") == Mix((50,), (1.0,)).order(epoch, "5")
    assert Mix((8,)).order(0, "1") == [3, 1, 7, 2, 5, 4, 6, 0]  # written down once: it must stay
    assert Mix((20, 30)).order(1, "5") == shuffled(50, "5 1")


def test_half_of_a_set_is_the_other_half_in_the_next_epoch():
    mix = Mix((10, 6), (0.5, 1.0))
    halves = [set(taken(mix, epoch)[0]) for epoch in range(4)]
    assert halves[0] | halves[1] == set(range(10))
    assert not halves[0] & halves[1]
    assert halves[0] != set(range(5)), "a random half"
    assert taken(mix, 0, "6")[0].keys() != halves[0], "another with another seed"
    assert mix.order(0, "5") != mix.order(2, "5"), "the same half in another order"


@settings(max_examples=100)
@given(
    sets=st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 3.5)), min_size=1, max_size=3), epochs=st.integers(1, 6)
)
def test_samples_of_a_set_are_taken_evenly(sets, epochs):
    sizes, weights = zip(*sets, strict=True)
    if any(weight * size < 0.5 for size, weight in sets):
        with pytest.raises(ValueError, match="samples in an epoch: raise it"):
            Mix(sizes, weights)
        return
    mix = Mix(sizes, weights)
    totals = [Counter() for _ in sizes]
    for epoch in range(epochs):
        for total, of_epoch in zip(totals, taken(mix, epoch), strict=True):
            total.update(of_epoch)
    for size, count, total in zip(sizes, mix.taken, totals, strict=True):
        often = [total[sample] for sample in range(size)]
        assert sum(often) == count * epochs
        assert max(often) - min(often) <= 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), "there are 1 weights and 2 data sets: give one for each set"),
        ((1.0, 0.0), "weight is 0.0; it must be positive"),
        ((float("nan"), 1.0), "weight is nan"),
        ((1.0, float("inf")), "weight is inf"),
        ((1.0, 0.04), "weight 0.04 takes none of a data set's 10 samples in an epoch: raise it"),
    ],
)
def test_weights_that_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Mix((5, 10), weights)


def test_a_mixture_reads_like_one_data_set(tmp_path):
    sets = [tokenized(tmp_path, *({"text": word * n} for n in range(1, many))) for word, many in (("a", 4), ("b", 9))]
    train, held_out = split_samples(sets[1], 3)
    for part in (train, held_out):
        assert samples_of(part) == [samples_of(sets[1])[index] for index in part.indices]
        assert part[-1]["labels"].tolist() == samples_of(part)[-1][1]
    whole = mixture([sets[0], train], [3, 1])
    wanted = samples_of(sets[0]) * 3 + samples_of(train)
    assert samples_of(whole) == wanted
    assert len(whole) == 3 * 3 + 5
    assert whole.lengths.tolist() == [len(ids) for ids, _ in wanted]
    assert whole.target_counts.tolist() == [sum(label != -100 for label in labels[1:]) for _, labels in wanted]
    assert whole.largest_token == ord("b")
    assert whole[-1]["input_ids"].tolist() == wanted[-1][0]
    assert samples_of(mixture([held_out, sets[0]])) == samples_of(held_out) + samples_of(sets[0])
