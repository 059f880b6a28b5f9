"""The work queue against LB-Mini, all ranks equal and one of them slowed by 30%.

    python -m bench.suites.work_queue [--quick] [--ranks 8] [--out FILE]

Real ranks on the real engine whose layers sleep (sleeping.py); the slow rank sleeps 1.3 times as long. Before that it
computes what the order of the queue and taking one pack ahead are worth, over many minibatches.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Sequence
from pathlib import Path

from odc_triton.balance import CostModel, assign, queue_packs
from odc_triton.base.report import table
from odc_triton.simulate import draw, named_lengths
from odc_triton.simulate.study import NAMED

from ..provenance import save_json
from .protocol_scale import MEAN_SAMPLE_S, POPULATION, Begun, make_cells, measure
from .sleeping import Measured, Way

# Fixed before anything was measured.
WAYS = (Way(schedule="odc", balance="mini"), Way(schedule="odc", balance="queue"))
SLOWER = 1.3
SLOW_RANK = 3
LENGTHS = ("longalign", "aime")
SAMPLES = (2, 4, 8)
ORDER_SAMPLES = (2, 4, 8, 16)
MINIBATCHES = 6
TARGETS = {1.0: 0.98, SLOWER: 1.15}  # LB-Mini's time over the queue's, at least

COLUMNS = (
    *("lengths", "samples/rank", "slow rank", "LB-Mini s", "queue s"),
    *("queue is faster by", "simulated", "best possible"),
)


def finish(costs: Sequence[float], ranks: int, slow: dict[int, float], *, ahead: bool = False) -> float:
    """When the last rank ends if each takes the next of `costs` when it is free; `ahead`: when it begins the previous.

    `ahead` allows reading and collating a pack while the previous one computes.
    """
    left = iter(costs)
    held = [next(left, None) if ahead else None for _ in range(ranks)]
    free = [(0.0, rank) for rank in range(ranks)]
    end = 0.0
    while free:
        now, rank = heapq.heappop(free)
        cost = held[rank] if ahead else next(left, None)
        if ahead:
            held[rank] = next(left, None)
        if cost is None:
            end = max(end, now)
        else:
            heapq.heappush(free, (now + cost * slow.get(rank, 1.0), rank))
    return end


ORDER_COLUMNS = (
    *("lengths", "samples/rank", "longest first", "planned order", "planned, one ahead"),
    *("slow rank: planned order", "slow rank: one ahead"),
)


def orders(name: str, samples: int, ranks: int, *, minibatches: int = 60) -> list[object]:
    """LB-Mini's time over the queue's, computed: a row under `ORDER_COLUMNS`. A slow rank's is the mean over which rank
    it is: who asks first is chance, so it may begin with the longest of the first packs or with the shortest.
    """
    cost, cap = CostModel.paper_7b(), NAMED[name].longest
    slows = [{rank: SLOWER} for rank in range(ranks)]
    totals = dict.fromkeys(("mini", "longest", "planned", "ahead", "mini slow", "planned slow", "ahead slow"), 0.0)
    for lengths in draw(named_lengths(name, POPULATION), samples=samples * ranks, minibatches=minibatches, seed=1):
        given = {"ranks": ranks, "token_cap": cap, "cost": cost}
        costs = [cost.pack(lengths[i] for i in members) for members in queue_packs(lengths, **given)]
        dealt = assign(lengths, balance="mini", **given)
        parts = [sum(cost.sequence(lengths[i]) for members in packs for i in members) for packs in dealt]
        totals["mini"] += max(parts)
        totals["longest"] += finish(sorted(costs, reverse=True), ranks, {})
        totals["planned"] += finish(costs, ranks, {})
        totals["ahead"] += finish(costs, ranks, {}, ahead=True)
        for slow in slows:
            totals["mini slow"] += max(part * slow.get(rank, 1.0) for rank, part in enumerate(parts))
            totals["planned slow"] += finish(costs, ranks, slow)
            totals["ahead slow"] += finish(costs, ranks, slow, ahead=True)
    ratios = [totals["mini"] / totals[key] for key in ("longest", "planned", "ahead")]
    ratios += [totals["mini slow"] / totals[key] for key in ("planned slow", "ahead slow")]
    return [name, samples, *(f"{ratio:.3f}x" for ratio in ratios)]


def best_s(result: Measured, ranks: int) -> float:
    """No balance is faster: all ranks' speeds together, and the longest sample on a rank of normal speed."""
    speed = sum(1 / result.cell.slow.get(rank, 1.0) for rank in range(ranks))
    return sum(
        max(sum(seconds) / speed, max(seconds))
        for seconds in ([result.cell.seconds([n]) for n in lengths] for lengths in result.cell.minibatches)
    )


def rows_of(results: Sequence[Measured], ranks: int) -> list[dict]:
    """One row for each pair of LB-Mini and queue on the same cell."""
    return [
        {
            "lengths": mini.cell.name,
            "samples_per_rank": mini.cell.samples,
            "ranks": ranks,
            "slower": max([1.0, *mini.cell.slow.values()]),
            "mini_s": mini.seconds,
            "queue_s": queue.seconds,
            "ratio": mini.total / queue.total,
            "ratio_simulated": sum(mini.simulated) / sum(queue.simulated),
            "ratio_best": mini.total / best_s(queue, ranks),
            "mini_microbatches": mini.microbatches,
            "queue_microbatches": queue.microbatches,
        }
        for mini, queue in zip(results[::2], results[1::2], strict=True)
    ]


def shown(row: dict) -> list[object]:
    slow = f"{row['slower']:.1f}x" if row["slower"] > 1 else "none"
    seconds = [f"{sum(row[key]):.2f}" for key in ("mini_s", "queue_s")]
    ratios = [f"{row[key]:.3f}x" for key in ("ratio", "ratio_simulated", "ratio_best")]
    return [row["lengths"], row["samples_per_rank"], slow, *seconds, *ratios]


def in_words(rows: Sequence[dict]) -> str:
    lines = []
    for slower, target in TARGETS.items():
        ratios = [row["ratio"] for row in rows if row["slower"] == slower]
        who = f"one rank {slower:.1f} times slower" if slower > 1 else "all ranks equal"
        met = sum(ratio >= target for ratio in ratios)
        lines.append(
            f"{who}: LB-Mini's time over the queue's is {min(ratios):.3f} to {max(ratios):.3f}; "
            f"{target:.2f} or more in {met} of {len(ratios)} cells"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.suites.work_queue", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cells: tests the program, no result")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args(arguments)
    if options.ranks <= SLOW_RANK:
        parser.error(f"--ranks is {options.ranks}: rank {SLOW_RANK} is the slow one, give {SLOW_RANK + 1} or more")
    lengths, samples, minibatches = (LENGTHS[:1], (8,), 1) if options.quick else (LENGTHS, SAMPLES, MINIBATCHES)
    begun = Begun()
    computed = [orders(name, count, options.ranks) for name in LENGTHS for count in ORDER_SAMPLES]
    print(f"computed: LB-Mini's time over the queue's\n\n{table(computed, ORDER_COLUMNS)}\n", flush=True)
    cells = [
        cell
        for slow in ({}, {SLOW_RANK: SLOWER})
        for cell in make_cells(lengths, samples, options.ranks, minibatches=minibatches, ways=WAYS, slow=slow)
    ]
    results, _ = measure(cells, options.ranks)
    rows = rows_of(results, options.ranks)
    print(f"measured\n\n{table([shown(row) for row in rows], COLUMNS)}")
    print(f"\n{in_words(rows)}")
    if options.out:
        report = {
            "rows": rows,
            "computed": [dict(zip(ORDER_COLUMNS, each, strict=True)) for each in computed],
            "mean_sample_s": MEAN_SAMPLE_S,
            "slow_rank": SLOW_RANK,
            **begun.about(),
        }
        save_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
