"""The protocol at 8 and 16 ranks without the GPUs: how ranks wait for each other, measured, simulated, bounded.

    python -m bench.suites.protocol_scale [--quick] [--ranks 8 16] [--lengths longalign swe-smith aime] [--out FILE]

Real ranks on the real engine whose layers sleep for the cost model's time (sleeping.py). A barrier before every
layer, forward and backward, stands for FSDP's collectives.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from odc_triton.balance import CostModel
from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.simulate import draw, named_lengths
from odc_triton.simulate.study import NAMED

from ..provenance import about, save_json
from .cells import FORWARD_SHARE, Cell, Way
from .sleeping import Costs, Measured, main_of_rank, together

# Fixed before anything was measured.
_BALANCES = {"fsdp": ("local", "micro", "global"), "odc": ("local", "micro", "mini", "queue", "split")}
WAYS = tuple(
    Way(schedule=schedule, balance=balance) for schedule, balances in _BALANCES.items() for balance in balances
)
BASELINE = Way(schedule="fsdp", balance="micro")  # the paper's
OURS = Way(schedule="odc", balance="mini")
RANKS = (8, 16)
SAMPLES = (1, 2, 4, 8)  # per rank
MINIBATCHES = 2
LAYERS = 4
MEAN_SAMPLE_S = 0.5  # sleep of a sample of mean cost: a layer's forward sleeps 42 ms, its backward 83 ms
POPULATION = 20_000
LONGEST_S = 20 * 60
OFF, OVER_BOUND, OF_A_LAYER = 0.05, 0.03, 0.02  # the targets

OTHERS = tuple(way for way in WAYS if way != BASELINE)
COLUMNS = ("lengths", "ranks", "samples/rank", *(way.name for way in OTHERS), "bound", "LB-Mini over its bound", "off")


def make_cells(
    lengths: Sequence[str],
    samples: Sequence[int],
    ranks: int,
    *,
    minibatches: int = MINIBATCHES,
    ways: tuple[Way, ...] = WAYS,
    hosts: int = 1,
    mean_s: float = MEAN_SAMPLE_S,
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
                ways=ways,
                hosts=hosts,
                token_cap=NAMED[name].longest,
                cost=cost,
                seconds_per_cost=mean_s / mean_cost,
                layers=LAYERS,
            )
            for count in samples
        ]
    return cells


def expected_s(cells: Sequence[Cell], ranks: int) -> float:
    """Seconds that the cells will take, as simulated."""
    return sum(sum(cell.simulated_s(way, ranks)) for cell in cells for way in cell.ways)


def measure(cells: Sequence[Cell], ranks: int) -> tuple[list[Measured], Costs]:
    """Runs the cells on `ranks` new processes."""
    of_ranks = launch(main_of_rank, cells, uuid.uuid4().hex, ranks=ranks)
    costs = of_ranks[0][1]
    return together(cells, [ran for ran, _ in of_ranks], costs.empty_s), costs


def row(result: Measured, baseline: Measured, ranks: int) -> dict:
    """Seconds of all minibatches together; speed-ups over `baseline`, the paper's FSDP + LB-Micro."""
    return {
        "lengths": result.cell.name,
        "ranks": ranks,
        "samples_per_rank": result.cell.samples,
        "way": result.way.name,
        "seconds": result.seconds,
        "simulated_s": result.simulated,
        "mean_work_s": result.mean_work,
        "largest_work_s": result.largest_work,
        "microbatches": result.microbatches,
        "speedup": baseline.total / result.total,
        "speedup_simulated": sum(baseline.simulated) / sum(result.simulated),
        "speedup_bound": baseline.total / sum(result.mean_work),
        "simulation_off": result.off,
        "over_own_bound": result.over_bound,
        "stall": result.stall,
    }


def rows_of(results: Sequence[Measured], ranks: int) -> list[dict]:
    baselines = {(r.cell.name, r.cell.samples): r for r in results if r.way == BASELINE}
    return [row(result, baselines[result.cell.name, result.cell.samples], ranks) for result in results]


def cells_of(rows: Sequence[dict]) -> list[list[object]]:
    """The table: per lengths, ranks and samples each way's speed-up, "measured / simulated"."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault((row["lengths"], row["ranks"], row["samples_per_rank"]), {})[row["way"]] = row
    return [
        [
            *key,
            *(f"{ways[w.name]['speedup']:.2f} / {ways[w.name]['speedup_simulated']:.2f}" for w in OTHERS),
            f"{ways[BASELINE.name]['speedup_bound']:.2f}",
            f"{ways[OURS.name]['over_own_bound']:+.1%}",
            f"{max((row['simulation_off'] for row in ways.values()), key=abs):+.1%}",
        ]
        for key, ways in groups.items()
    ]


def in_words(rows: Sequence[dict], costs: dict[int, Costs]) -> str:
    """The targets, each with what was found."""
    layer_s = MEAN_SAMPLE_S / LAYERS / 2  # the mean of a forward's and a backward's sleep
    lines = []
    for ranks, cost in costs.items():
        share = cost.gate_s / layer_s
        lines.append(
            f"{ranks} ranks, no compute: a barrier takes {cost.gate_s * 1e3:.2f} ms, {share:.1%} of a layer's mean "
            f"sleep of {layer_s * 1e3:.0f} ms (target {OF_A_LAYER:.0%}; gloo's barrier {cost.gloo_s * 1e3:.2f} ms); "
            f"a minibatch without microbatches {cost.empty_s * 1e3:.1f} ms; a layer {cost.layer_s * 1e3:.2f} ms beside "
            f"its sleep, {cost.layer_with_gate_s * 1e3:.2f} ms with the barrier, all ranks at once on these cores"
        )
    off = sorted(abs(r["simulation_off"]) for r in rows)
    lines.append(
        f"simulation against measurement: largest difference {off[-1]:.1%}, median {off[len(off) // 2]:.1%}, within "
        f"{OFF:.0%} in {sum(x <= OFF for x in off)} of {len(off)} (target: all)"
    )
    over = [r["over_own_bound"] for r in rows if r["way"] == OURS.name]
    lines.append(
        f"{OURS.name} over its largest rank's work: at most {max(over):.1%}, mean {sum(over) / len(over):.1%} "
        f"(target {OVER_BOUND:.0%})"
    )
    lines.append(f"ranks wait for pieces of split samples for at most {max(r['stall'] for r in rows):.1%} of the time")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.suites.protocol_scale", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cells at 8 ranks: tests the program, no result")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--lengths", nargs="+", choices=sorted(NAMED), default=["longalign", "swe-smith", "aime"])
    parser.add_argument("--samples", type=int, nargs="+", default=list(SAMPLES), help="per rank")
    parser.add_argument("--minibatches", type=int, default=MINIBATCHES, help="of each cell")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks, options.lengths, options.samples, options.minibatches = [8], ["longalign"], [2, 4], 1
    start_s, load = time.monotonic(), os.getloadavg()
    plan = {
        ranks: make_cells(options.lengths, options.samples, ranks, minibatches=options.minibatches)
        for ranks in options.ranks
    }
    expected = sum(expected_s(cells, ranks) for ranks, cells in plan.items())
    count = sum(len(cell.ways) for cells in plan.values() for cell in cells)
    print(f"{count} cells of {options.minibatches} minibatches, about {expected / 60:.1f} minutes", flush=True)
    if expected > LONGEST_S:
        print(f"that is over {LONGEST_S / 60:.0f} minutes: give fewer --ranks, --lengths, --samples", file=sys.stderr)
        return 2
    rows: list[dict] = []
    costs: dict[int, Costs] = {}
    for ranks, cells in plan.items():
        results, costs[ranks] = measure(cells, ranks)
        rows += rows_of(results, ranks)
    print(f"speed-up over {BASELINE.name}, measured / simulated; off: the simulation that is farthest off\n")
    print(table(cells_of(rows), COLUMNS))
    print(f"\n{in_words(rows, costs)}")
    if options.out:
        report = {
            "rows": rows,
            "costs": {ranks: dataclasses.asdict(cost) for ranks, cost in costs.items()},
            "layers": LAYERS,
            "mean_sample_s": MEAN_SAMPLE_S,
            "forward_share": FORWARD_SHARE,
            "took_s": time.monotonic() - start_s,
            # With this run's own ranks at its end.
            "load_average_before": load,
            "load_average_after": os.getloadavg(),
            **about(),
        }
        save_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
