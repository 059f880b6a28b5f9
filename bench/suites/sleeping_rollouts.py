"""A rollout inside of the minibatch at 8 and 16 ranks, without the GPUs: real ranks that sleep (sleeping_sampler.py).

    python -m bench.suites.sleeping_rollouts [--ranks 8 16] [--steps 20] [--out bench/results/overlap.json]

In turns ranks compute what has come while others sample ("overlapped"), or all sample first ("phased"). Beside the
ratio of their times is its bound, counted from when the phased ranks themselves had sampled: see overlap_bound.py.
"""

from __future__ import annotations

import argparse
import math
import time
import uuid
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

from odc_triton.base.report import table
from odc_triton.comm.launch import launch

from ..harness import bootstrap_ratio
from ..provenance import about, save_parts
from .overlap_bound import least_s
from .sleeping_sampler import (
    GENERATIONS,
    LAYERS,
    OF_ONE,
    OVERLAPPED,
    PHASED,
    PROMPTS,
    STEP_S,
    TOGETHER,
    Cell,
    Ran,
    group_cost,
    main_of_rank,
)

# Fixed before anything was measured.
RANKS = (8, 16)
RATIOS = (1, 3)  # sampling seconds to computing seconds
STEPS = 20
WANTED = 0.9  # of the bound
COLUMNS = (
    "ranks",
    "rollout : update",
    "phased s",
    "overlapped s",
    "ratio",
    "95% interval",
    "bound",
    "ratio / bound",
    "waits for a core",
)


def least_of(cell: Cell, step: int, of_ranks: Sequence[Ran], empty_s: float) -> float:
    """`least_s` of a phased step. Computing takes the cost model's time, and all that is not computing or sampling as
    long as an empty step.
    """
    start_s = min(ran.start_s for ran in of_ranks)
    sampled_s = [math.fsum(batch.end_s - batch.start_s for batch in ran.batches) for ran in of_ranks]
    released = [
        (batch.end_s - start_s, cell.seconds_per_cost * group_cost(cell.lengths[step][slot]))
        for ran in of_ranks
        for batch in ran.batches
        for slot in batch.slots
    ]
    return least_s(released, sampled_s) + empty_s


def besides_s(of_ranks: Sequence[Ran]) -> float:
    """Of a phased step: what is neither the longest sampling nor the longest computing."""
    sampled_s = max(math.fsum(batch.end_s - batch.start_s for batch in ran.batches) for ran in of_ranks)
    return seconds(of_ranks) - sampled_s - max(math.fsum(ran.computed_s) for ran in of_ranks)


def seconds(of_ranks: Sequence[Ran]) -> float:
    """Of one step."""
    return max(ran.end_s for ran in of_ranks) - min(ran.start_s for ran in of_ranks)


def waiting(of_ranks: Sequence[Ran]) -> float:
    """Of one step's time, the share for which a rank waited for a core."""
    return mean(ran.waited_s for ran in of_ranks) / seconds(of_ranks)


def row(cell: Cell, of_ranks: Sequence[dict[str, list[Ran]]], empty_s: float) -> dict[str, Any]:
    """One cell. Ratios are of all steps together."""
    steps = {way: [*zip(*(ran[way] for ran in of_ranks), strict=True)] for way in of_ranks[0]}
    times = {way: [*map(seconds, each)] for way, each in steps.items()}
    least = [least_of(cell, step, each, empty_s) for step, each in enumerate(steps[PHASED])]
    ratio, bound = bootstrap_ratio(times[PHASED], times[OVERLAPPED]), sum(times[PHASED]) / sum(least)
    return {
        "ranks": cell.ranks,
        "rollout_to_update": cell.ratio,
        "median_s": {way: median(each) for way, each in times.items()},
        **ratio,
        "bound": bound,
        "of_bound": ratio["ratio"] / bound,
        "empty_s": empty_s,
        "besides_s": median(map(besides_s, steps[PHASED])),
        "packs_per_rank": {way: mean(len(ran.computed_s) for ran in chain(*each)) for way, each in steps.items()},
        "waited": {way: mean(map(waiting, each)) for way, each in steps.items()},
        "seconds": times,
        "least_s": least,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of each cell and way")
    parser.add_argument("--seconds", type=float, default=STEP_S, help="of a rank's step, sampling and computing")
    parser.add_argument("--part", default="sleeping", help="key of the file")
    parser.add_argument("--out", type=Path, default=None, help="JSON file, whose other keys stay")
    options = parser.parse_args(arguments)
    start_s, rows = time.monotonic(), []
    for ranks in options.ranks:
        cells = [Cell.draw(ranks, ratio, options.steps, options.seconds) for ratio in options.ratios]
        found = launch(main_of_rank, cells, uuid.uuid4().hex, ranks=ranks)
        of_cells = zip(*(of_rank for of_rank, _ in found), strict=True)
        rows += [row(cell, of_ranks, found[0][1]) for cell, of_ranks in zip(cells, of_cells, strict=True)]
        print(f"{ranks} ranks: {time.monotonic() - start_s:.0f} s", flush=True)
    print(
        table(
            [
                [
                    of["ranks"],
                    f"{of['rollout_to_update']:g} : 1",
                    *(f"{of['median_s'][way]:.2f}" for way in (PHASED, OVERLAPPED)),
                    f"{of['ratio']:.3f}",
                    f"{of['low']:.3f} .. {of['high']:.3f}",
                    f"{of['bound']:.3f}",
                    f"{of['of_bound']:.3f}",
                    " / ".join(f"{of['waited'][way]:.0%}" for way in (PHASED, OVERLAPPED)),
                ]
                for of in rows
            ],
            COLUMNS,
        )
    )
    print(f"at least {WANTED:g} of the bound in {sum(of['of_bound'] >= WANTED for of in rows)} of {len(rows)} cells")
    if options.out:
        settings = {"prompts": PROMPTS, "generations": GENERATIONS, "together": TOGETHER, "tokens_of_one": OF_ONE}
        settings |= {"layers": LAYERS, "step_s": options.seconds, "wanted": WANTED}
        done = {"cells": rows, **settings, "took_s": time.monotonic() - start_s, **about()}
        save_parts(options.out, **{options.part: done})


if __name__ == "__main__":
    main()
