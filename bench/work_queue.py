"""The work queue against LB-Mini, all ranks equal and one of them slowed by 30%.

    python -m bench.work_queue [--quick] [--ranks 8] [--out FILE]

Real ranks on the real engine whose layers sleep (bench/sleeping.py); the slow rank sleeps 1.3 times as long.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.protocol_scale import MEAN_SAMPLE_S, Begun, about, make_cells, measure
from bench.sleeping import Measured, Way
from odc_triton.report import table
from odc_triton.trace import write_file

# Fixed before anything was measured.
WAYS = (Way(schedule="odc", balance="mini"), Way(schedule="odc", balance="queue"))
SLOWER = 1.3
SLOW_RANK = 3
LENGTHS = ("longalign", "aime")
SAMPLES = (2, 4, 8)
MINIBATCHES = 3
TARGETS = {1.0: 0.98, SLOWER: 1.15}  # LB-Mini's time over the queue's, at least

COLUMNS = (
    "lengths",
    "samples/rank",
    "slow rank",
    "LB-Mini s",
    "queue s",
    "queue is faster by",
    "simulated",
    "best possible",
)


def best_s(result: Measured, ranks: int) -> float:
    """No dealing is faster: all ranks' speeds together, and the longest sample on a rank of usual speed."""
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
    return [
        row["lengths"],
        row["samples_per_rank"],
        f"{row['slower']:.1f}x" if row["slower"] > 1 else "none",
        f"{sum(row['mini_s']):.2f}",
        f"{sum(row['queue_s']):.2f}",
        f"{row['ratio']:.3f}x",
        f"{row['ratio_simulated']:.3f}x",
        f"{row['ratio_best']:.3f}x",
    ]


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
    parser = argparse.ArgumentParser(prog="bench.work_queue", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cells: a test of the program, no result")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args(arguments)
    if options.ranks <= SLOW_RANK:
        parser.error(f"--ranks is {options.ranks}: rank {SLOW_RANK} is the slow one, give {SLOW_RANK + 1} or more")
    lengths, samples, minibatches = (LENGTHS[:1], (8,), 1) if options.quick else (LENGTHS, SAMPLES, MINIBATCHES)
    begun = Begun()
    cells = [
        cell
        for slow in ({}, {SLOW_RANK: SLOWER})
        for cell in make_cells(lengths, samples, options.ranks, minibatches=minibatches, ways=WAYS, slow=slow)
    ]
    results, _ = measure(cells, options.ranks)
    rows = rows_of(results, options.ranks)
    print(table([shown(row) for row in rows], COLUMNS))
    print(f"\n{in_words(rows)}")
    if options.out:
        report = {"rows": rows, "mean_sample_s": MEAN_SAMPLE_S, "slow_rank": SLOW_RANK, **about(begun)}
        write_file(options.out, (json.dumps(report, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
