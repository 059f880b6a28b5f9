"""Which workloads gain and which don't: all baselines over three distributions of lengths and three seeds.

    python -m bench.reports.end_to_end --out bench/results

Writes end_to_end.json and end_to_end.md; docs/performance.md shows the table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from odc_triton.base.files import write_file
from odc_triton.base.report import table
from odc_triton.base.trace import excerpt, idle_fraction
from odc_triton.comm.launch import launch

from .. import quiet
from ..cut import cut
from ..demo import CONFIG, RANKS, text_of
from ..harness import Measured, Work, bootstrap_ratio, compare, disturbed, single_thread_environment
from ..provenance import about, save_json
from ..variants import Ddp, Fsdp2, Fsdp2Micro, Fsdp2NoReshard, LayerBarrier, Odc, OdcMicro

VARIANTS = (Fsdp2, Fsdp2Micro, Fsdp2NoReshard, Ddp, LayerBarrier, OdcMicro, Odc)
BASELINES = (Fsdp2, Fsdp2Micro, Fsdp2NoReshard, Ddp)
TOKEN_CAP = 2048
TOKENS = 8_000  # roughly, in every minibatch of all ranks, whatever the lengths
WARM_UP = 1
MINIBATCHES = 3
SEEDS = (0, 1, 2)


def chat_like(generator: random.Random) -> int:
    """Short instructions and answers: log-normal, median 150 tokens."""
    return min(max(int(generator.lognormvariate(5.0, 0.7)), 8), 1024)


def longalign_like(generator: random.Random) -> int:
    """LongAlign's mean 16.5 K and maximum 64 K tokens, divided by 32: log-normal, mean about 516, at most 2,048."""
    return min(max(int(generator.lognormvariate(5.8, 1.0)), 16), 2048)


def equal(generator: random.Random) -> int:
    """Nothing to balance: all 512 tokens."""
    return 512


DISTRIBUTIONS = {"chat-like": chat_like, "LongAlign-like / 32": longalign_like, "equal": equal}


def make_work(text: np.ndarray, lengths_of: Callable[[random.Random], int], seed: int, path: Path) -> Work:
    """Samples of drawn lengths, cut from the demo's real text; whole minibatches of about TOKENS tokens."""
    generator = random.Random(seed)
    lengths: list[int] = []
    minibatches: list[list[int]] = []
    for _ in range(WARM_UP + MINIBATCHES):
        first, tokens = len(lengths), 0
        while tokens < TOKENS or (len(lengths) - first) % RANKS:
            lengths.append(lengths_of(generator))
            tokens += lengths[-1]
        minibatches.append(list(range(first, len(lengths))))
    start = generator.randrange(len(text) - sum(lengths))
    cut(text[start:], lengths).save(path)
    return Work(dataset=str(path), config=CONFIG, minibatches=minibatches, token_cap=TOKEN_CAP, seed=seed)


def measure(name: str, seed: int, text: np.ndarray, folder: Path) -> list[Measured]:
    work = make_work(text, DISTRIBUTIONS[name], seed, folder / "drawn.npz")
    return launch(compare, VARIANTS, work, False, WARM_UP, ranks=RANKS)[0]


def summarise(cells: dict[str, list[list[Measured]]]) -> tuple[list[list[str]], dict]:
    """One row per distribution and variant: its time over ODC + LB-Mini's, the minibatches of all seeds together."""
    rows, numbers = [], {}
    for name, runs in cells.items():
        of = {kind.name: [result for run in runs for result in run if result.name == kind.name] for kind in VARIANTS}
        timed = {key: [second for result in found for second in result.seconds[WARM_UP:]] for key, found in of.items()}
        shown = range(WARM_UP, WARM_UP + MINIBATCHES)
        fastest = min((kind.name for kind in BASELINES), key=lambda key: sum(timed[key]))
        numbers[name] = {"fastest_baseline": fastest, "disturbed": disturbed_in(runs), "variants": {}}
        for kind in VARIANTS:
            ratio = bootstrap_ratio(timed[kind.name], timed[Odc.name])
            idle = [idle_fraction(excerpt({"": r.events}, minibatches=shown)[""]) for r in of[kind.name]]
            numbers[name]["variants"][kind.name] = {**ratio, "seconds": timed[kind.name], "idle_fraction": idle}
            mark = " (fastest baseline)" if kind.name == fastest else ""
            mean, interval = statistics.mean(timed[kind.name]), f"{ratio['low']:.2f} to {ratio['high']:.2f}"
            waited = f"{statistics.mean(idle):.1%}" if kind.records_waiting else "not recorded"
            rows.append([name, kind.name + mark, f"{mean:.2f}", f"{ratio['ratio']:.2f}", interval, waited])
    return rows, numbers


def disturbed_in(runs: Sequence[Sequence[Measured]]) -> dict[str, int | None]:
    """`disturbed` of several runs together."""
    found = [disturbed(run, WARM_UP) for run in runs]
    left = [each["left"] for each in found]
    anew = sum(each["measured_anew"] for each in found)
    return {"measured_anew": anew, "left": None if None in left else sum(left)}


COLUMNS = ("lengths", "variant", "s per minibatch", "time over ODC + LB-Mini's", "95% interval", "idle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    out = parser.parse_args().out
    single_thread_environment()
    start_s = time.monotonic()
    cells: dict[str, list[list[Measured]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        text = text_of(Path(scratch))
        for name in DISTRIBUTIONS:
            for seed in SEEDS:
                cells.setdefault(name, []).append(measure(name, seed, text, Path(scratch)))
                print(f"{name}, seed {seed}: done after {time.monotonic() - start_s:.0f} s", flush=True)
    rows, numbers = summarise(cells)
    told = [f"{name}: {quiet.in_words(cell['disturbed'], MINIBATCHES * len(SEEDS))}" for name, cell in numbers.items()]
    shown = "\n\n".join([table(rows, COLUMNS), *told])
    out.mkdir(parents=True, exist_ok=True)
    save_json(out / "end_to_end.json", about() | {"config": CONFIG, "ranks": RANKS, "cells": numbers})
    write_file(out / "end_to_end.md", (shown + "\n").encode())
    print(shown)


if __name__ == "__main__":
    main()
