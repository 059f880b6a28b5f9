"""Ranks that sleep: the bound and the ratio of a step done by hand, and how long a cell samples and computes."""

from __future__ import annotations

import pytest

from bench.suites.sleeping_rollouts import besides_s, least_of, row
from bench.suites.sleeping_sampler import OVERLAPPED, PHASED, Batch, Cell, Ran, group_cost


def ran(*batches: tuple[float, float, int], end_s: float, computed_s: float) -> Ran:
    of = [Batch(start_s=start_s, end_s=stop_s, slots=[slot]) for start_s, stop_s, slot in batches]
    return Ran(start_s=10.0, end_s=end_s, batches=of, computed_s=[computed_s], waited_s=0.1)


def test_a_row_of_two_ranks_done_by_hand() -> None:
    # Of equal groups, each of which takes one rank a second to compute.
    cell = Cell(ranks=2, ratio=1.0, lengths=[[[10, 20], [10, 20], [10, 20]]])
    cell.__dict__["seconds_per_cost"] = 1 / group_cost([10, 20])
    phased = [
        ran((10.0, 11.0, 0), (11.0, 14.0, 2), end_s=17.0, computed_s=2.0),
        ran((10.0, 12.0, 1), end_s=16.9, computed_s=1.0),
    ]
    assert besides_s(phased) == pytest.approx(7 - 4 - 2)
    # The last group comes at 4 and is left to both; (4 + 2 + 3) / 2 is as long.
    assert least_of(cell, 0, phased, 0.5) == pytest.approx(4.5 + 0.5)
    overlapped = [ran(end_s=15.6, computed_s=1.5), ran(end_s=15.0, computed_s=1.5)]
    of_ranks = [{OVERLAPPED: [one], PHASED: [other]} for one, other in zip(overlapped, phased, strict=True)]
    found = row(cell, of_ranks, 0.5)
    assert (found["ratio"], found["bound"]) == (pytest.approx(7 / 5.6), pytest.approx(7 / 5))
    assert found["of_bound"] == pytest.approx(5 / 5.6)
    assert found["waited"] == pytest.approx({OVERLAPPED: 0.1 / 5.6, PHASED: 0.1 / 7})


def test_a_cell_samples_and_computes_for_as_long_as_it_says() -> None:
    cell, again = (Cell.draw(8, 3.0, 2) for _ in range(2))
    assert cell.lengths == again.lengths
    slots = cell.slots(0)
    assert len({seed for slot in slots for seed in slot.seeds}) == sum(map(len, cell.lengths[0]))
    whole = sum(cell.seconds_per_cost * group_cost(group) for of in cell.lengths for group in of)
    sampled = sum(
        cell.seconds_per_token * max(max(group) for group in of[at : at + 2])
        for of in cell.lengths
        for at in range(0, len(of), 2)
    )
    assert sampled / whole == pytest.approx(3)
