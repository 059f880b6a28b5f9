"""Ranks whose layers sleep: every sample is slept once, barriers hold everybody, and the numbers are what they say."""

from __future__ import annotations

import uuid
from itertools import pairwise

import pytest

from bench.suites import protocol_scale
from bench.suites.cells import Cell, Way
from bench.suites.protocol_scale import BASELINE, OURS, WAYS, in_words, rows_of
from bench.suites.sleeping import Costs, Ran, run_cells, together
from odc_triton.balance import CostModel
from tests.support import ranks

QUEUE = Way(schedule="odc", balance="queue")


def cell(ways: tuple[Way, ...] = WAYS, **change: object) -> Cell:
    """Four samples of 1, 2, 3 and 6 units for two ranks."""
    settings = {
        "name": "four",
        "samples": 2,
        "minibatches": [[100, 200, 300, 600]],
        "ways": ways,
        "token_cap": 600,
        "cost": CostModel(quadratic=0.0, linear=1.0),
        "seconds_per_cost": 0.01,
        "layers": 2,
    }
    return Cell(**{**settings, **change})


def _tiny(rank: int, world: int, cells: list[Cell], name: str) -> tuple[list[Ran], Costs]:
    return run_cells(cells, name)


@pytest.mark.slow
def test_a_real_run_sleeps_every_sample_once_in_every_way() -> None:
    short = {"seconds_per_cost": 1e-4}  # 10 to 60 ms a sample
    cells = [
        cell(minibatches=[[100, 200, 300, 600], [50, 60, 70, 80]], **short),
        cell((OURS, QUEUE), **short),
    ]
    of_ranks = ranks.run(_tiny, 2, cells, uuid.uuid4().hex)
    assert all(cost > 0 for cost in vars(of_ranks[0][1]).values())
    measured = together(cells, [ran for ran, _ in of_ranks])
    assert [m.way for m in measured] == [*WAYS, OURS, QUEUE]
    for result in measured[: len(WAYS)]:
        for index, lengths in enumerate(result.cell.minibatches):
            runs = [
                r for ran, _ in of_ranks for r in ran if (r.cell, r.way, r.index) == (0, WAYS.index(result.way), index)
            ]
            assert sum(r.slept_s for r in runs) == pytest.approx(1e-4 * sum(lengths))
            if result.way.schedule == "fsdp":  # else the gate would have held somebody
                assert len({r.packs for r in runs}) == 1
        # A sleep is never too short, so this holds on any machine.
        assert all(took >= own for took, own in zip(result.seconds, result.largest_work, strict=True))
        assert result.off < 0
    queue = measured[-1]
    assert sum(queue.microbatches[0]) == 4
    # Ranks are in turn: no two minibatches overlap.
    for ran, _ in of_ranks:
        assert all(a.end_s <= b.start_s for a, b in pairwise(ran))


def test_the_simulator_and_the_bounds_of_a_case_done_by_hand() -> None:
    of = cell()
    # Position deals [1, 2] and [3, 6] units, longest first: layers synchronise at 6 and 3 under FSDP.
    assert of.simulated_s(Way(schedule="fsdp", balance="local"), 2) == pytest.approx([9.0])
    assert of.simulated_s(OURS, 2) == pytest.approx([6.0])
    assert of.simulated_s(QUEUE, 2) == pytest.approx([6.0])
    for schedule in ("fsdp", "odc"):  # each with the minibatch's own barriers once
        way = Way(schedule=schedule, balance="micro")
        assert of.simulated_s(way, 2, 0.5)[0] - of.simulated_s(way, 2)[0] == pytest.approx(0.5)
    assert of.simulated_s(Way(schedule="odc", balance="local"), 2) == pytest.approx([9.0])

    def ran(way: int, start_s: float, end_s: float, slept_s: float) -> Ran:
        return Ran(cell=0, way=way, index=0, start_s=start_s, end_s=end_s, slept_s=slept_s, packs=1, stalled_s=0.8)

    one = cell((BASELINE, OURS))
    base, ours = together([one], [[ran(0, 0.0, 7.9, 6.0), ran(1, 10, 16.4, 6)], [ran(0, 0.1, 8, 6), ran(1, 10, 16, 6)]])
    assert (base.seconds, ours.seconds) == (pytest.approx([8.0]), pytest.approx([6.4]))
    assert ours.mean_work == pytest.approx([6.0])
    assert ours.over_bound == pytest.approx(0.4 / 6)
    assert ours.off == pytest.approx(6 / 6.4 - 1)
    rows = rows_of([base, ours], 2)
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 8 / 6.4])
    assert rows[1]["speedup_bound"] == pytest.approx(8 / 6)
    assert rows[1]["stall"] == pytest.approx(1.6 / (2 * 6.4))
    words = in_words(rows, {2: Costs(gate_s=1e-3, gloo_s=5e-3, empty_s=9e-3, layer_s=1e-3, layer_with_gate_s=2e-3)})
    assert "a barrier takes 1.00 ms, 1.6% of a layer's mean sleep of 62 ms" in words
    assert "wait for pieces of split samples for at most 12.5% of the time" in words
    assert "at most 6.7%" in words
    assert "within 5% in 1 of 2" in words
    whole = [{**rows[1], "way": way.name} if way not in (BASELINE, OURS) else rows[way == OURS] for way in WAYS]
    (line,) = protocol_scale.cells_of(whole)
    assert len(line) == len(protocol_scale.COLUMNS)
    assert line[:4] == ["four", 2, 2, "1.25 / 1.33"]
    assert line[-3:] == ["1.33", "+6.7%", "-6.2%"]
