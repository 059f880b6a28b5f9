"""The kernels' benchmark: every operator on the layers of real models, beside named baselines.

    python -m bench.run [--operator NAME ...] [--model llama-3-8b ...] [--tokens 128 ...] [--world 1 2 4 8]
                        [--dtype bfloat16] [--peers loopback|pinned] [--quick] [--check] [--seconds 500] [--out FOLDER]

Checks every result against plain torch first, on new random numbers, then times it on the GPU: rounds in which ours and
every baseline run once, the L2 flushed before each. Prints one table and the targets with their verdicts, and keeps
kernels.json and kernels.md in FOLDER up to date while it runs. Without a GPU it checks a tiny model in Triton's
interpreter and times nothing. Exits with 0 if every check passed and there was one, else with 1.

Peers are plain buffers of the one GPU (loopback: no link in the figures) or, with --peers pinned, host memory that the
GPU reads and writes over its bus: a real link, and a slow one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.operators import all_operators, place  # first: it decides where kernels run  # isort: skip

import torch

from bench.operators.cell import Cell
from bench.operators.models import MODELS, TINY, Model
from bench.operators.operator import Operator, Prepared, Problem
from bench.operators.targets import TARGETS
from bench.operators.timing import interleaved, median_interval, peak_bytes, quantiles, warm_up
from bench.provenance import commit, gpu, hardware, versions
from bench.roofline import Machine
from odc_triton.atomic import write_file
from odc_triton.report import table

# In the order of interest, for a run may end early.
TOKENS = (4096, 16, 128, 16384, 1, 1024, 65536)
WORLDS = (8, 1, 2, 4)
QUICK = {"models": ("llama-3-8b",), "tokens": (16, 128, 4096), "worlds": (8,), "cell_seconds": 0.2}
CHECK_TOKENS = (1, 33)
SAVE_EVERY_S = 5.0
DTYPES = ("bfloat16", "float16", "float32")

# Of a result's largest number. 16 bits: one rounding at the end (the interpreter cuts off where a GPU rounds), or of
# what is summed. fp32: up to 65,536 terms in another order, added by matrix units that keep a few bits less.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2**-6}


@dataclass(kw_only=True)
class Report:
    """All that a run found. `left_out`: cells that were not begun or did not fit, each with the reason."""

    cells: list[Cell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.cells) and all(cell.passed for cell in self.cells)

    def targets(self) -> list[dict[str, object]]:
        return [target.verdict(self.cells) for target in TARGETS]

    def save(self, folder: Path) -> None:
        cells = [asdict(cell) for cell in self.cells]
        for cell in cells:  # JSON knows no infinity, which is what an unwritten result is off by
            cell["errors"] = {name: error if math.isfinite(error) else None for name, error in cell["errors"].items()}
        data = {**self.about, "passed": self.passed, "cells": cells, "targets": self.targets()}
        write_file(folder / "kernels.json", json.dumps(data | {"left_out": self.left_out}, indent=1).encode())
        write_file(folder / "kernels.md", self.text().encode())

    def text(self) -> str:
        """Both tables, and what they were measured on, as Markdown."""
        about = [f"{key}: {value}" for key, value in self.about.items() if value is not None]
        parts = ["\n".join(f"- {line}" for line in about), table([row_of(cell) for cell in self.cells], COLUMNS)]
        verdicts = [[*(found.values())] for found in self.targets()]
        parts.append(table(verdicts, ("target", "verdict", "worst", "in", "cells")))
        if self.left_out:
            parts.append("Left out:\n" + "\n".join(f"- {line}" for line in self.left_out))
        return "\n\n".join(parts) + "\n"


COLUMNS = (
    "operator",
    "model",
    "layer",
    "N x K",
    "tokens",
    "world",
    "check",
    "p20 us",
    "p50 us",
    "p80 us",
    "TFLOP/s",
    "HBM GB/s",
    "link GB/s",
    "of roofline",
    "faster than (95% interval)",
)


def row_of(cell: Cell) -> list[object]:
    ours = cell.us.get("ours", {})
    ratios = [f"{name} {r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for name, r in cell.ratios.items()]
    ratios += [f"{name}: {why}" for name, why in cell.missing.items()]
    worst = max(cell.errors.values(), default=0.0)
    return [
        cell.operator,
        cell.model,
        cell.layer,
        f"{cell.rows} x {cell.columns}",
        cell.tokens or None,
        cell.world,
        f"passed, {worst:.1e}" if cell.passed else f"FAILED: {cell.fault}",
        *(ours.get(name) for name in ("p20", "p50", "p80")),
        cell.tflops,
        cell.hbm_gb_s,
        cell.link_gb_s,
        cell.of_roofline,
        "; ".join(ratios),
    ]


def problems(
    operators: Sequence[Operator],
    models: Sequence[Model],
    tokens: Sequence[int],
    worlds: Sequence[int],
    *,
    dtype: torch.dtype,
    peers: str,
) -> list[tuple[Operator, Problem]]:
    """All cells, one of each operator in turn, what a target is about first: a run may end early."""

    def of_no_target(pair: tuple[Operator, Problem]) -> bool:
        return not any(target.applies(Cell.of(*pair)) for target in TARGETS)

    each = [
        sorted(
            (
                (operator, Problem(model=model, layer=layer, tokens=count, world=world, dtype=dtype, peers=peers))
                for world in worlds
                for model in models
                for count in (tokens if operator.has_tokens else (0,))
                for layer in operator.layers(model)
                if count <= operator.most_tokens and not (peers == "pinned" and world == 1)
            ),
            key=of_no_target,
        )
        for operator in operators
    ]
    found = [pair for turn in zip_longest(*each) for pair in turn if pair is not None]
    # An addition into host memory is what a GPU might not be able to do, and a fault would be the end of the run.
    return sorted(found, key=lambda pair: (peers == "pinned" and pair[0].reduces, of_no_target(pair)))


def check(cell: Cell, prepared: Prepared) -> None:
    """Runs the operator once against its reference and writes what came of it into the cell."""
    largest: dict[str, float] = {}
    differs: dict[str, float] = {}
    limits: dict[str, float] = {}
    for name, got, want in prepared.check():
        if got.shape != want.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, its reference {tuple(want.shape)}")
        limits[name] = TOLERANCE[got.dtype]
        if got.numel():
            difference = (got.double() - want.double()).abs().max().item()
            largest[name] = max(largest.get(name, 0.0), want.double().abs().max().item())
            # A NaN, of a poisoned element that was not written, must not lose against a number.
            differs[name] = max(differs.get(name, 0.0), difference) if difference == difference else float("inf")
            cell.errors[name] = differs[name] / (largest[name] or 1.0)
    wrong = {name: error for name, error in cell.errors.items() if error > limits[name]}
    cell.fault = ", ".join(f"{name} is off by {error:.2e}, allowed {limits[name]:.1e}" for name, error in wrong.items())
    cell.passed = not wrong


def measure(cell: Cell, prepared: Prepared, machine: Machine, *, seconds: float) -> None:
    """Times the operator and its baselines and writes the figures into the cell."""
    runs, cell.missing = warm_up({"ours": prepared.run, **prepared.baselines})
    us = interleaved(runs, seconds=seconds)
    cell.us = {name: quantiles(values) for name, values in us.items()}
    cell.rounds = len(us["ours"])
    for name in us.keys() - {"ours"}:
        cell.ratios[name] = median_interval([b / a for a, b in zip(us["ours"], us[name], strict=True)])
    cell.ratios = {name: cell.ratios[name] for name in prepared.baselines if name in cell.ratios}
    second, work = cell.us["ours"]["p50"] / 1e6, prepared.work
    here = work.hbm_bytes + (work.peer_bytes if cell.peers == "loopback" else 0)
    cell.tflops = work.flops / second / 1e12
    cell.hbm_gb_s = here / second / 1e9
    cell.link_gb_s = work.link_bytes / second / 1e9 if cell.peers == "pinned" else None
    cell.of_roofline = machine.seconds(work) / second
    cell.peak_bytes, cell.whole_bytes = peak_bytes(prepared.run), prepared.whole_bytes


def run_cells(
    todo: Sequence[tuple[Operator, Problem]],
    report: Report,
    *,
    machine: Machine | None,
    seed: int,
    folder: Path,
    deadline_s: float = float("inf"),
    cell_seconds: float = 1.0,
) -> None:
    """Checks every cell and, with a `machine`, times it; the report in `folder` is never older than a few seconds.

    Begins no cell after `deadline_s`, by `time.monotonic`. A fault that ends the GPU's context ends the run.
    """
    saved_s = 0.0
    for index, (operator, problem) in enumerate(todo):
        if time.monotonic() > deadline_s:
            report.left_out += [f"{Cell.of(*pair).name}: no time left" for pair in todo[index:]]
            break
        cell = Cell.of(operator, problem)
        torch.manual_seed(seed)  # so that one cell can be run again alone
        try:
            prepared = operator.prepare(problem)
            check(cell, prepared)
            if machine is None:
                for baseline in prepared.baselines.values():
                    baseline()
            elif cell.passed:
                measure(cell, prepared, machine, seconds=cell_seconds)
        except torch.OutOfMemoryError as error:
            report.left_out.append(f"{cell.name}: {str(error).splitlines()[0]}")
            torch.cuda.empty_cache()
            continue
        except Exception as error:  # whatever a kernel or compiler raises is this cell's result; the others still run
            cell.passed, cell.fault = False, f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            prepared = None  # its memory is the next cell's
        report.cells.append(cell)
        print(f"  {'passed' if cell.passed else 'FAILED'}  {cell.name}  {cell.fault}", flush=True)
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            report.save(folder)
            saved_s = time.monotonic()
        if not cell.passed and not _gpu_answers():
            report.left_out += [f"{Cell.of(*pair).name}: the GPU's context was lost" for pair in todo[index + 1 :]]
            break
    report.save(folder)


def _gpu_answers() -> bool:
    try:
        if place.DEVICE.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _named(parser: argparse.ArgumentParser, what: str, names: Sequence[str], known: dict[str, Any]) -> list[Any]:
    for name in names:
        if name not in known:
            parser.error(f"there is no {what} {name!r}; known are {', '.join(map(repr, known))}")
    return [known[name] for name in names or known]


def main(words: Sequence[str] | None = None) -> int:
    about, _, more = __doc__.partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=about, epilog=more, formatter_class=kind)
    parser.add_argument("--operator", nargs="+", default=[], help=f"of {', '.join(map(repr, all_operators()))}")
    parser.add_argument("--model", nargs="+", default=[], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", nargs="+", type=int, default=None, help=f"default: {TOKENS}")
    parser.add_argument("--world", nargs="+", type=int, default=None, help=f"default: {WORLDS}")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--peers", choices=("loopback", "pinned"), default="loopback")
    parser.add_argument("--quick", action="store_true", help="one model, three numbers of tokens, a world of 8")
    parser.add_argument(
        "--check", action="store_true", help="a tiny model is checked and nothing timed, as without a GPU"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--seed", type=int, default=None, help="of the random numbers; default: a new one")
    parser.add_argument("--out", type=Path, default=Path("out/kernels"), help="folder of kernels.json and kernels.md")
    options = parser.parse_args(words)
    start_s = time.monotonic()
    operators = _named(parser, "operator", options.operator, all_operators())
    models = _named(parser, "model", options.model or (QUICK["models"] if options.quick else ()), MODELS)
    on_gpu = place.DEVICE.type == "cuda"
    if options.peers == "pinned" and not on_gpu:
        parser.error("--peers pinned is host memory as a GPU sees it, and there is no GPU; use --peers loopback")
    if bad := [number for number in (*(options.tokens or ()), *(options.world or ())) if number < 1]:
        parser.error(f"--tokens and --world are numbers of at least 1, not {', '.join(map(str, bad))}")
    tokens = options.tokens or (QUICK["tokens"] if options.quick else TOKENS)
    timed = on_gpu and not options.check
    if not timed:
        models, tokens = [TINY], options.tokens or CHECK_TOKENS
        where = "A tiny model is checked" if on_gpu else "No GPU: a tiny model is checked in Triton's interpreter"
        print(f"{where}, and nothing is timed.", flush=True)
    worlds = options.world or (QUICK["worlds"] if options.quick else WORLDS)
    dtype = getattr(torch, options.dtype)
    seed = torch.seed() if options.seed is None else options.seed
    options.out.mkdir(parents=True, exist_ok=True)
    machine = Machine.measured(dtype=dtype, peers=options.peers) if timed else None
    report = Report(
        about={
            "hardware": hardware(),
            "gpu": gpu(),
            "reached": asdict(machine) if machine else None,
            "timed": timed,
            "peers": {"loopback": "loopback: no link in these figures", "pinned": "pinned host memory"}[options.peers],
            "dtype": options.dtype,
            "seed": seed,
            "versions": versions(),
            "commit": commit(),
        }
    )
    run_cells(
        problems(operators, models, tokens, worlds, dtype=dtype, peers=options.peers),
        report,
        machine=machine,
        seed=seed,
        folder=options.out,
        deadline_s=start_s + options.seconds,
        cell_seconds=QUICK["cell_seconds"] if options.quick else 1.0,
    )
    print(report.text())
    failed = [cell for cell in report.cells if not cell.passed]
    print(
        f"{len(report.cells) - len(failed)} of {len(report.cells)} cells passed their check, "
        f"{'timed on the GPU' if timed else 'nothing was timed'}; {len(report.left_out)} left out; seed {seed}"
    )
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
