"""What splitting long sequences brings: with sleeping layers, on real cores, in memory, and what a plan costs.

    python -m bench.suites.split [--quick] [--only sleeping|cpu|memory|planner] [--out FILE]

Each part has a file of its own, which defines what its rows say: split_sleeping.py, split_cpu.py, split_memory.py.
Each begins by saying how long it will take. What FILE, by default bench/results/split.json, has of other parts is kept;
a quick run writes nothing unless told where.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from odc_triton.balance import CostModel
from odc_triton.balance.split import deal_split, readable_tokens
from odc_triton.base.report import table
from odc_triton.simulate import draw, named_lengths
from odc_triton.simulate.study import NAMED

from .. import quiet
from ..harness import single_thread_environment
from ..provenance import RESULTS, refuse_results, save_json
from . import split_cpu, split_memory, split_sleeping
from .protocol_scale import RANKS, Begun

PARTS = ("sleeping", "cpu", "memory", "planner")
PLANNED = ((16, 1), (16, 2), (16, 4), (16, 8), (1024, 1), (1024, 2), (1024, 4), (1024, 8))  # ranks, samples per rank
PLANS = 5  # of each
MINUTES_OF_START = 0.5  # of the ranks of one number of ranks, at most

QUICK_CONFIG = split_cpu.CONFIG | {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}


def sleeping(quick: bool) -> list[dict]:
    cells = split_sleeping.plan(RANKS, list(NAMED))
    if quick:
        cells = split_sleeping.plan([2], ["longalign"], {1: 0.1}, minibatches=1)
    _say("sleeping", split_sleeping.seconds_of(cells) / 60 + len(cells) * MINUTES_OF_START)
    rows = split_sleeping.run(cells)
    print(table([split_sleeping.cells_of(row) for row in rows], split_sleeping.COLUMNS), flush=True)
    return rows


def cpu(quick: bool) -> list[dict]:
    counts = {1: 2} if quick else split_cpu.MINIBATCHES
    how = {"longest": 512, "config": QUICK_CONFIG} if quick else {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        works = {n: split_cpu.work_of(Path(folder), n, count, **how) for n, count in counts.items()}
        _say("cpu", 0.0 if quick else sum(map(split_cpu.seconds_of, works.values())) / 60)
        for samples, work in works.items():
            rows.append(split_cpu.run(work, samples, progress=not quick))
            told = quiet.in_words(rows[-1]["disturbed"], rows[-1]["minibatches"])
            print(f"{samples} samples per rank: {told}", flush=True)
    print(table([split_cpu.cells_of(row) for row in rows], split_cpu.COLUMNS), flush=True)
    return rows


def memory(quick: bool) -> list[dict]:
    how = {"longest": 512, "config": QUICK_CONFIG} if quick else {}
    counts = split_memory.RANKS[: 1 if quick else None]
    _say("memory", MINUTES_OF_START * len(counts))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in counts:
            work = split_cpu.work_of(Path(folder), 1, 2 if quick else split_cpu.MINIBATCHES[1], ranks=ranks, **how)
            rows.append(split_memory.run(work, ranks, Path(folder)))
    print(table([split_memory.cells_of(row) for row in rows], split_memory.COLUMNS), flush=True)
    return rows


def planner(quick: bool) -> list[dict]:
    """Rows {ranks, samples_per_rank, ms, most_ms}: the median and the most of `PLANS` minibatches' planning."""
    _say("planner", MINUTES_OF_START)
    rows = [planned(ranks, samples) for ranks, samples in PLANNED[: 1 if quick else None]]
    print(table([list(row.values()) for row in rows], ("ranks", "samples/rank", "ms", "most ms")), flush=True)
    return rows


def planned(ranks: int, samples: int) -> dict:
    """LongAlign-like lengths, the costs of the paper's 7 B model, a token cap that every sample fits."""
    cost, cap = CostModel.paper_7b(), NAMED["longalign"].longest
    how = {"ranks": ranks, "token_cap": cap, "cost": cost}
    tokens = readable_tokens([cap], samples=samples * ranks, **how)
    lengths = named_lengths("longalign", max(20_000, samples * ranks))
    took_ms = []
    for minibatch in draw(lengths, samples=samples * ranks, minibatches=PLANS):
        start_s = time.perf_counter()
        deal_split(minibatch, tokens=tokens, **how)
        took_ms.append((time.perf_counter() - start_s) * 1e3)
    return {
        "ranks": ranks,
        "samples_per_rank": samples,
        "ms": statistics.median(took_ms),
        "most_ms": max(took_ms),
    }


def _say(part: str, minutes: float) -> None:
    print(f"{part}: about {minutes:.1f} minutes", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.suites.split", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a little of each part: tests the program, no result")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--out", type=Path, default=None, help="JSON file (default: bench/results/split.json)")
    options = parser.parse_args(arguments)
    out = options.out or (None if options.quick else RESULTS / "split.json")
    if options.quick and out:
        refuse_results(out.parent)
    single_thread_environment()
    measure = {"sleeping": sleeping, "cpu": cpu, "memory": memory, "planner": planner}
    for part in [options.only] if options.only else PARTS:
        begun = Begun()
        found = measure[part](options.quick)
        if out:
            before = json.loads(out.read_text()) if out.exists() else {}
            save_json(out, with_part(before, part, found, begun.about()))
    return 0


def with_part(report: Mapping[str, object], part: str, found: object, about: dict) -> dict:
    """The report with one part measured anew, and what that was measured on."""
    return {**report, part: found, "about": {**report.get("about", {}), part: about}}


if __name__ == "__main__":
    sys.exit(main())
