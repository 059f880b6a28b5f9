"""Shared prefixes at 8 and 16 ranks without the GPUs: real ranks whose layers sleep, and wait for each other's pieces.

    python -m bench.suites.sleeping_trees OUT.json [--ranks 8 16] [--minibatches 3]

Agentic lengths: prompts of 8K to 32K tokens, completions of 1K to 8K, most of them short, 8 of a prompt. A tree over
ranks beside a tree per rank, prefixes repeated on several, and an even share. As in sleeping.py nothing else is slow.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odc_triton.balance import CostModel
from odc_triton.balance.relatives import Relatives, find_relatives
from odc_triton.base.report import table
from odc_triton.data.records import IGNORED

from .. import trees
from ..provenance import about, save_parts
from .cells import Cell, Way
from .protocol_scale import LAYERS, measure
from .sleeping import Measured

GROUP = 8
PROMPT, COMPLETION = (8_000, 32_000), (1_000, 8_000)
AMPLE = 131_072  # more than any tree
SHAPES = ((0.5, AMPLE), (1, AMPLE), (4, AMPLE), (4, 40_000))  # trees per rank, token cap
EVEN_SHARE_S = 2.0  # of a minibatch, of one tree a rank or fewer
WAYS = {way: Way(schedule="odc", balance=way) for way in trees.WAYS}
COLUMNS = ("ranks", "trees/rank", "cap", "over a tree per rank", "over repeated", "of the even share", "waits")


def draw(count: int, seed: int) -> Relatives:
    """The samples of `count` trees. Prompts are uniform, completions log-uniform."""
    numbers, samples = random.Random(seed), []
    for tree in range(count):
        prompt = np.full(numbers.randint(*PROMPT), tree)
        for number in range(GROUP):
            completion = np.full(round(math.exp(numbers.uniform(*map(math.log, COMPLETION)))), count + number)
            ids = np.concatenate([prompt, completion])
            samples.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), IGNORED, ids)})
    return find_relatives(samples)


def make_cells(ranks: int, minibatches: int) -> list[Cell]:
    cost, cells = CostModel.paper_7b(), []
    for per_rank, cap in SHAPES:
        longer = max(per_rank / 2, 1)  # the more trees, the more alike are minibatches, and the more packs have a rank
        relatives = [draw(round(per_rank * ranks), seed) for seed in range(round(minibatches / longer))]
        settings = {"samples": round(GROUP * per_rank), "token_cap": cap, "cost": cost, "layers": LAYERS}
        settings |= {"minibatches": [each.lengths for each in relatives], "relatives": tuple(relatives)}
        one = Cell(name=f"{per_rank}", ways=tuple(WAYS.values()), seconds_per_cost=1.0, **settings)
        even = sum(one.even_share_s(index, ranks) for index in range(len(relatives))) / len(relatives)
        cells.append(Cell(name=one.name, ways=one.ways, seconds_per_cost=EVEN_SHARE_S * longer / even, **settings))
    return cells


def row(of: dict[str, Measured], ranks: int) -> dict[str, Any]:
    """Seconds of all minibatches together."""
    ours = of[trees.SHARED]
    return {
        "ranks": ranks,
        "trees_per_rank": float(ours.cell.name),
        "token_cap": ours.cell.token_cap,
        "over_tree_per_rank": of[trees.TREES].total / ours.total,
        "over_repeated": of[trees.REPEATED].total / ours.total,
        "over_even_share": sum(ours.mean_work) / ours.total,
        "stall": ours.stall,
        "over_bound": ours.over_bound,
        "seconds": {way: measured.seconds for way, measured in of.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file, whose other keys stay")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--minibatches", type=int, default=3, help="of one tree a rank or fewer")
    options = parser.parse_args(arguments)
    start_s, rows = time.monotonic(), []
    for ranks in options.ranks:
        cells = make_cells(ranks, options.minibatches)
        measured, _ = measure(cells, ranks)
        rows += [row({m.way.balance: m for m in measured if m.cell is cell}, ranks) for cell in cells]
        print(f"{ranks} ranks: {time.monotonic() - start_s:.0f} s", flush=True)
    save_parts(options.out, sleeping=rows, sleeping_about={"took_s": time.monotonic() - start_s, **about()})
    shown = ("over_tree_per_rank", "over_repeated", "over_even_share", "stall")
    print(
        table(
            [[of["ranks"], of["trees_per_rank"], of["token_cap"], *(f"{of[key]:.3f}" for key in shown)] for of in rows],
            COLUMNS,
        )
    )


if __name__ == "__main__":
    main()
