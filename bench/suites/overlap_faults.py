"""GRPO whose ranks compute while others sample, disturbed at random moments, and resumed.

    python -m bench.suites.overlap_faults [--faults 60] [--seed 0] [--kinds kill …] [--out FILE]

Each time `odc-triton train grpo --overlap-rollout on` meets a fault in a random step. It must end within 15 s, name
what happened, and leave nothing behind. Then `--resume auto` must end with the weights of a run that nothing disturbed,
up to rounding: which completions make a pack depends on when they come, and so do fp32 sums inside of a pack, also with
--exact.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from odc_triton.base.report import table
from odc_triton.train.metrics import read_metrics
from tests.support.grpo_case import write_prompts

from ..harness import single_thread_environment
from ..provenance import about, save_json
from .overlap_jobs import KILLS, KINDS, PROMPTS, SAMPLING, STEPS, STOPS, Cell, Ended, Fault, run

WITHIN_S = 15.0
RELATIVE = 5e-6  # differences of weights, to the largest change
TRIES = 5  # until a fault's place is reached
COLUMNS = ("kind", "tried", "ended: median s", "largest s", "steps given up", "largest difference", "wrong")
_BOTH = (False, True)
_PRODUCT = itertools.product((2, 3), SAMPLING, _BOTH, _BOTH)
CELLS = [Cell(ranks=ranks, sampling=how, exact=exact, split=split) for ranks, how, exact, split in _PRODUCT]
CELLS = [cell for cell in CELLS if not (cell.split and cell.sampling == "transformers")]  # long completions take long


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


class Undisturbed:
    """Of each kind of job a run without a fault, made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cut = folder, 0
        self.data = write_prompts(folder / "data", prompts=PROMPTS)
        self._start = _weights(self.data / "start")
        self._known: dict[Cell, tuple[dict[str, torch.Tensor], float]] = {}

    def _of(self, cell: Cell) -> tuple[dict[str, torch.Tensor], float]:
        if cell not in self._known:
            folder = self.folder / f"whole-{len(self._known)}"
            ended = run(self.data, folder, cell)
            if ended.status != 0 or ended.stayed:
                raise RuntimeError(f"{cell}: {ended.problems}{ended.stayed}")
            self.cut += ended.cut
            seconds = [line["seconds"] for line in read_metrics(folder / "out" / "metrics.jsonl")]
            self._known[cell] = _weights(folder / "out" / "model"), statistics.median(seconds)
        return self._known[cell]

    def step_s(self, cell: Cell) -> float:
        return self._of(cell)[1]

    def difference(self, cell: Cell, out: Path) -> float:
        """The largest of the weights in `out`, relative to the largest change since the start."""
        whole, found = self._of(cell)[0], _weights(out / "model")
        change = max((each - self._start[name]).abs().max() for name, each in whole.items())
        return (max((found[name] - each).abs().max() for name, each in whole.items()) / change).item()


def _wrong(fault: Fault, ended: Ended, steps: int) -> list[str]:
    """What is wrong with the end of the disturbed run. `steps`: that it has done."""
    status, words = fault.end
    lines = ended.problems.strip().splitlines() or [""]
    last = next((line for line in reversed(lines) if line.startswith("odc-triton: ")), lines[-1])
    wrong = [f"{each} stayed" for each in ended.stayed]
    if ended.status != status:
        wrong.append(f"its status is {ended.status}")
    wrong += [f"{each!r} is not in {last!r}" for each in words if each not in last]
    if not fault.kind.startswith("reward"):  # whose own traceback follows
        wrong += [f"after it: {lines[-1]!r}"] * (last != lines[-1]) + ["a traceback"] * ("Traceback" in ended.problems)
    if ended.end_s - ended.struck_s > WITHIN_S:
        wrong.append(f"it ended after {ended.end_s - ended.struck_s:.1f} s")
    if fault.kind in STOPS and f"stopped after step {steps} of {STEPS}, saved in" not in ended.text and steps:
        wrong.append(f"{ended.text.strip().splitlines()[-1]!r} and {steps} steps")
    return wrong


def disturb(numbers: random.Random, kind: str, cell: Cell, undisturbed: Undisturbed, folder: Path) -> dict[str, Any]:
    """One fault, and the resumed run: how they ended."""
    step_s = undisturbed.step_s(cell)
    for number in range(TRIES):
        fault, own = Fault.at_random(numbers, kind, cell), folder / str(number)
        ended = run(undisturbed.data, own, cell, fault, step_s)
        if ended.struck_s is not None:
            break
    else:
        raise RuntimeError(f"{fault}: its place is not reached")
    out = own / "out"
    steps = len(read_metrics(out / "metrics.jsonl")) if (out / "metrics.jsonl").exists() else 0
    wrong, difference = _wrong(fault, ended, steps), None
    resumed = run(undisturbed.data, own, cell)
    if resumed.status != 0:
        wrong.append(f"resumed, it failed: {resumed.problems.strip().splitlines()[-1]}")
    else:
        difference = undisturbed.difference(cell, out)
        wrong += [f"weights differ by {difference:.1e}"] * (not difference <= RELATIVE)
        wrong += ["steps are not there once"] * (
            [line["step"] for line in read_metrics(out / "metrics.jsonl")] != [*range(1, STEPS + 1)]
        )
    hidden = [each.name for each in (*out.glob(".*"), *out.glob("checkpoints/.*")) if each.name != ".lock"]
    wrong += [f"{each} stayed" for each in (*resumed.stayed, *hidden)]
    return {
        **{name: value for name, value in asdict(fault).items() if name not in ("cell", "prompt")},
        **asdict(cell),
        "ended_s": ended.end_s - ended.struck_s,
        "steps": steps,
        "difference": difference,
        "wrong": wrong,
    }


def rows_of(faults: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind."""
    rows = []
    for kind in KINDS:
        if some := [each for each in faults if each["kind"] == kind]:
            seconds = [each["ended_s"] for each in some]
            rows.append(
                {
                    "kind": kind,
                    "tried": len(some),
                    "median_s": statistics.median(seconds),
                    "largest_s": max(seconds),
                    "given_up": sum(each["steps"] == each["step"] for each in some)
                    if kind in (*KILLS, *STOPS)
                    else None,
                    "largest_difference": max(each["difference"] or 0.0 for each in some),
                    "wrong": sum(bool(each["wrong"]) for each in some),
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.suites.overlap_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args(arguments)
    single_thread_environment()
    numbers, faults = random.Random(options.seed), []
    cells = numbers.sample(CELLS * -(-options.faults // len(CELLS)), options.faults)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Undisturbed(Path(folder))
        for number, cell in enumerate(cells):
            kind = options.kinds[number % len(options.kinds)]
            faults.append(disturb(numbers, kind, cell, undisturbed, Path(folder, f"fault-{number}")))
            found = faults[-1]
            print(f"{number}: {kind}, {cell}: {found['ended_s']:.1f} s, {found['difference']}", flush=True)
            for each in found["wrong"]:
                print(f"  wrong: {each}", flush=True)
    rows = rows_of(faults)
    print(
        table([[f"{each:.2g}" if isinstance(each, float) else each for each in row.values()] for row in rows], COLUMNS)
    )
    if options.out:
        result = {"rows": rows, "faults": faults, "cut_steps": undisturbed.cut, "seed": options.seed}
        save_json(options.out, result | {"within_s": WITHIN_S, "allowed_difference": RELATIVE, **about()})
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
