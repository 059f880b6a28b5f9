"""The bound of an overlapped rollout: each of its three parts, in cases done by hand, and from ranks' own times."""

from __future__ import annotations

import pytest

from bench.suites.sleeping_rollouts import besides_s, least_of, least_s, row
from bench.suites.sleeping_sampler import OVERLAPPED, PHASED, Batch, Cell, Ran, group_cost


@pytest.mark.parametrize(
    ("sampled_s", "released", "wanted_s"),
    [
        ([4.0, 2.0], [(1.0, 3.0), (2.0, 3.0)], 6.0),  # both ranks are busy all the time: (6 + 6) / 2
        ([9.0, 1.0], [(1.0, 2.0)], 9.0),  # one samples for longer than all else takes
        ([4.0, 2.0], [(1.0, 0.5), (4.0, 5.0)], 6.5),  # what comes last is left to both: 4 + 5 / 2
        ([4.0, 0.5], [(4.0, 2.0), (3.5, 2.0)], 5.5),  # and what came shortly before: 3.5 + 4 / 2
        ([4.0, 0.5], [(4.0, 1.0), (4.0, 2.0)], 5.5),  # both come at once
        ([2.0], [(1.0, 3.0), (2.0, 2.0)], 7.0),  # one rank does one after the other
        ([2.0, 1.0], [], 2.0),
    ],
)
def test_the_least_time_of_a_step(sampled_s: list[float], released: list[tuple[float, float]], wanted_s: float) -> None:
    assert least_s(sampled_s, released, 0.0) == pytest.approx(wanted_s)
    assert least_s(sampled_s, released[::-1], 0.25) == pytest.approx(wanted_s + 0.25)


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
