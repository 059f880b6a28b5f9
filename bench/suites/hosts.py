"""Split sequences on several hosts without GPUs: real ranks with simulated compute, a replica on each host.

    python -m bench.suites.hosts [--shapes 2x4 2x8 4x4] [--lengths longalign swe-smith aime] [--out FILE]

Layers sleep for the cost model's time (sleeping.py). Ranks whose ODC_HOST differs share no memory; samples are
distributed over the hosts, and each splits its own. It is compared with LB-Mini over all ranks, and with global packing
and a barrier before every layer, for HSDP's collectives. `--shapes 1x8`: one host.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

from odc_triton.balance import CostModel
from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import table
from odc_triton.simulate import draw, named_lengths
from odc_triton.tools.simulate.study import NAMED

from ..provenance import about, options_of, save_parts
from .cells import Cell, Way
from .sleeping import Measured, main_of_rank, together

OURS = Way(schedule="odc", balance="mini")
SPLIT = Way(schedule="odc", balance="split")
GLOBAL = Way(schedule="fsdp", balance="global")
WAYS = (SPLIT, OURS, GLOBAL)
SHAPES = ["2x4", "2x8", "4x4"]  # hosts x ranks of each
LENGTHS = ["longalign", "swe-smith", "aime"]
SAMPLES = [1, 2, 4]  # per rank
MINIBATCHES = 2  # of each cell
MEAN_SAMPLE_S = 1.5  # sleep of a sample of mean cost: a layer's forward sleeps 125 ms, its backward 250 ms
LAYERS = 4
POPULATION = 20_000


def make_cells(
    lengths: Sequence[str], samples: Sequence[int], ranks: int, *, minibatches: int, hosts: int, mean_s: float
) -> list[Cell]:
    """One cell per named lengths and samples per rank, with the paper's costs for a 7 B model."""
    cost = CostModel.paper_7b()
    cells = []
    for name in lengths:
        population = named_lengths(name, POPULATION)
        mean_cost = sum(map(cost.sequence, population)) / len(population)
        cells += [
            Cell(
                name=name,
                samples=count,
                minibatches=draw(population, samples=count * ranks, minibatches=minibatches, seed=count),
                ways=WAYS,
                hosts=hosts,
                token_cap=NAMED[name].longest,
                cost=cost,
                seconds_per_cost=mean_s / mean_cost,
                layers=LAYERS,
            )
            for count in samples
        ]
    return cells


def row(results: dict[Way, Measured], hosts: int, ranks: int, mean_s: float) -> dict[str, Any]:
    """`even_share`: the share of the ideal time in which ranks compute. Seconds of all minibatches together."""
    ours = results[SPLIT]
    bound_s = sum(ours.cell.bound_s(index, ranks) for index in range(len(ours.seconds)))
    return {
        "hosts": hosts,
        "ranks": ranks,
        "lengths": ours.cell.name,
        "samples_per_rank": ours.cell.samples,
        "mean_sample_s": mean_s,
        "share_of_bound": bound_s / ours.total,
        "even_share": sum(ours.mean_work) / bound_s,
        "over_lb_mini": results[OURS].total / ours.total,
        "over_barriers": results[GLOBAL].total / ours.total,
        "stall": ours.stall,
        "simulation_off": ours.off,
        "seconds": {way.name: measured.seconds for way, measured in results.items()},
    }


def run(
    shape: str, lengths: Sequence[str], samples: Sequence[int], minibatches: int, mean_s: float
) -> list[dict[str, Any]]:
    hosts, of_host = map(int, shape.split("x"))
    ranks = hosts * of_host
    cells = make_cells(lengths, samples, ranks, minibatches=minibatches, hosts=hosts, mean_s=mean_s)
    of_ranks = launch(main_of_rank, cells, uuid.uuid4().hex, ranks=ranks)
    measured = together(cells, [ran for ran, _ in of_ranks], of_ranks[0][1])
    return [row({each.way: each for each in measured if each.cell is cell}, hosts, ranks, mean_s) for cell in cells]


def main() -> int:
    how = {"shapes": SHAPES, "lengths": LENGTHS, "samples": SAMPLES}
    options = options_of(__doc__, **how, minibatches=MINIBATCHES, mean_sample_s=MEAN_SAMPLE_S)
    start_s, load, rows = time.monotonic(), os.getloadavg(), []
    for shape in options.shapes:
        rows += run(shape, options.lengths, options.samples, options.minibatches, options.mean_sample_s)
        print(f"{shape}: {time.monotonic() - start_s:.0f} s", flush=True)
    shown = [key for key in rows[0] if key != "seconds"]
    print(table([[row[key] for key in shown] for row in rows], shown))
    if options.out:
        took = {"took_s": time.monotonic() - start_s, "load_average_before": load}
        save_parts(options.out, sleeping=rows, sleeping_about={**took, **about()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
