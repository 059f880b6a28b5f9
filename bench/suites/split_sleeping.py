"""Splitting at 8 and 16 real ranks whose layers sleep: its gain, what would be possible, and what ranks wait for.

Of each row, over all of its minibatches together:

    split_over_lb_mini                      ODC + LB-Mini's time over split ODC's
    split_over_barrier_global_packing       the time of a meeting before every layer, packed globally, over split ODC's
    bound             ODC + LB-Mini's time over the even share: the sleep of all samples over the ranks
    share_of_bound    split_over_lb_mini / bound, which is the even share over split ODC's time
    stall             of split ODC's time, all ranks', the share in which a rank waits for other ranks' pieces:
                      for flags inside of waves, in forward and backward
    simulation_off    simulated over measured time, less 1, of the one of the three that is farthest off
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from odc_triton.simulate.job import SPLIT

from .protocol_scale import expected_s, make_cells, measure
from .sleeping import Cell, Measured, Way

BARRIER, LB_MINI, SPLIT_WAY = WAYS = (
    Way(schedule="fsdp", balance="global"),
    Way(schedule="odc", balance="mini"),
    Way(schedule="odc", balance=SPLIT),
)
MINIBATCHES = 3  # of each cell
# Sleep of a sample of mean cost, by samples per rank: the fewer, the longer, so that layers sleep long against what 16
# ranks spend on two cores besides. All four then take about as long.
MEAN_SAMPLE_S = {1: 1.5, 2: 1.0, 4: 0.75, 8: 0.5}
COLUMNS = ("lengths", "ranks", "samples/rank", "over LB-Mini", "over barrier", "bound", "of the bound", "stall", "off")


def plan(
    ranks: Sequence[int],
    lengths: Sequence[str],
    mean_sample_s: Mapping[int, float] = MEAN_SAMPLE_S,
    *,
    minibatches: int = MINIBATCHES,
) -> dict[int, list[Cell]]:
    """The cells of each number of ranks: all `lengths` at all samples per rank that `mean_sample_s` has a sleep for."""

    def cells(count: int, samples: int, sleep_s: float) -> list[Cell]:
        return make_cells(lengths, [samples], count, minibatches=minibatches, mean_sample_s=sleep_s, ways=WAYS)

    return {
        count: [cell for samples, sleep_s in mean_sample_s.items() for cell in cells(count, samples, sleep_s)]
        for count in ranks
    }


def seconds_of(cells: dict[int, list[Cell]]) -> float:
    """What they will take, as simulated."""
    return sum(expected_s(each, ranks) for ranks, each in cells.items())


def run(cells: dict[int, list[Cell]]) -> list[dict]:
    """Measures all cells; a row of each."""
    return [row for ranks, each in cells.items() for row in rows_of(measure(each, ranks)[0], ranks)]


def rows_of(results: Sequence[Measured], ranks: int) -> list[dict]:
    """A row for each cell, whose `WAYS` come one after another."""
    return [row_of(*results[first : first + len(WAYS)], ranks=ranks) for first in range(0, len(results), len(WAYS))]


def row_of(barrier: Measured, lb_mini: Measured, split: Measured, *, ranks: int) -> dict:
    even_s = sum(split.mean_work)
    return {
        "lengths": split.cell.name,
        "ranks": ranks,
        "samples_per_rank": split.cell.samples,
        "split_over_lb_mini": lb_mini.total / split.total,
        "split_over_barrier_global_packing": barrier.total / split.total,
        "bound": lb_mini.total / even_s,
        "share_of_bound": even_s / split.total,
        "stall": split.stall,
        "simulation_off": max((each.off for each in (barrier, lb_mini, split)), key=abs),
        "minibatches": len(split.seconds),
        "seconds": {each.way.name: each.seconds for each in (barrier, lb_mini, split)},
    }


def cells_of(row: dict) -> list[object]:
    """A line of the table."""
    ratios = (row["split_over_lb_mini"], row["split_over_barrier_global_packing"], row["bound"])
    return [
        row["lengths"],
        row["ranks"],
        row["samples_per_rank"],
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{row['share_of_bound']:.1%}",
        f"{row['stall']:.1%}",
        f"{row['simulation_off']:+.1%}",
    ]
