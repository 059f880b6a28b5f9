"""The kernels' benchmark: every operator on the layers of real models, against named baselines.

    python -m bench.kernels.run [--operator NAME ...] [--model llama-3-8b ...] [--tokens 128 ...] [--world 1 2 4 8]
                        [--dtype bfloat16] [--peers loopback|pinned] [--quick] [--check] [--seconds 500] [--out FOLDER]
                        [--resume] [--report] [--rehearse]

Checks every result against plain torch first, on new random numbers, then times it on the GPU: rounds in which ours and
every baseline run once, the L2 flushed before each. Cells that a first run on a GPU needs come first. Prints one
table. Every cell is appended to kernels.jsonl in FOLDER as it ends, so a kill loses none;
kernels.json and kernels.md are kept up to date. --resume keeps the cells that a run of the same code on the same GPU
has measured; one that a kill or a hang cut short comes last. --report only rebuilds both files.

Without a GPU a tiny model is checked in Triton's interpreter and nothing is timed; --rehearse times that by the host's
clock, to try this program itself. Exits with 0 if there was a check and all passed, else with 1.

Peers are plain buffers on the one GPU (loopback: no link in the figures) or, with --peers pinned, host memory that the
GPU reads and writes over its bus: a real link, but a slow one.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from .operators import all_operators  # first: it decides where kernels run  # isort: skip

from ..device import Gpu, Rehearsal
from ..provenance import append_line, commit, hardware, refuse_results, source_digest, versions
from .cells import LINES, Cell, Report, plain, wanted_first
from .problem import DEVICE, MODELS, TINY, Model, Operator, Prepared, Problem
from .timing import Machine, interleaved, median_interval, quantiles, warm_up

# In order of interest, because a run may end early.
TOKENS = (4096, 16, 128, 16384, 1, 1024, 65536)
WORLDS = (8, 1, 2, 4)
QUICK = {"models": ("llama-3-8b",), "tokens": (16, 128, 4096), "worlds": (8,), "cell_seconds": 0.2}
CHECK_TOKENS = (1, 33)
SAVE_EVERY_S = 5.0
CELL_S = 90.0  # a cell that takes longer hangs: the process ends itself, and the next run continues with the others
DTYPES = ("bfloat16", "float16", "float32")

# Relative to a result's largest number. 16 bits: one rounding, at the end (the interpreter truncates where a GPU
# rounds) or of the terms. fp32: up to 65,536 terms in another order, added by matrix units that keep a few bits less.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2**-6}


def problems(
    operators: Sequence[Operator],
    models: Sequence[Model],
    tokens: Sequence[int],
    worlds: Sequence[int],
    *,
    dtype: torch.dtype,
    peers: str,
) -> list[tuple[Operator, Problem]]:
    """All cells, one of each operator in turn, in the order of `wanted_first`: a run may end early."""

    def rank_of(pair: tuple[Operator, Problem]) -> int:
        return wanted_first(Cell.of(*pair))

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
            key=rank_of,
        )
        for operator in operators
    ]
    found = [pair for turn in zip_longest(*each) for pair in turn if pair is not None]
    # A GPU might be unable to add into host memory, and a fault would end the run.
    return sorted(found, key=lambda pair: (peers == "pinned" and pair[0].reduces, rank_of(pair)))


def check(cell: Cell, prepared: Prepared) -> None:
    """Runs the operator once against its reference and writes the result into the cell."""
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
            # A NaN, from a poisoned element that was not written, must not lose to a number.
            differs[name] = max(differs.get(name, 0.0), difference) if difference == difference else float("inf")
            cell.errors[name] = differs[name] / (largest[name] or 1.0)
    wrong = {name: error for name, error in cell.errors.items() if error > limits[name]}
    cell.fault = ", ".join(f"{name} is off by {error:.2e}, allowed {limits[name]:.1e}" for name, error in wrong.items())
    cell.passed = not wrong


def measure(cell: Cell, prepared: Prepared, machine: Machine, gpu: Gpu, *, seconds: float) -> None:
    """Times the operator and its baselines and writes the figures into the cell."""
    runs, cell.missing = warm_up({"ours": prepared.run, **prepared.baselines}, gpu)
    us = interleaved(runs, gpu, seconds=seconds)
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
    cell.peak_bytes, cell.whole_bytes = gpu.peak_bytes(prepared.run), prepared.whole_bytes


def run_cells(
    todo: Sequence[tuple[Operator, Problem]],
    report: Report,
    *,
    machine: Machine | None,
    seed: int,
    folder: Path,
    gpu: Gpu | None = None,
    deadline_s: float = float("inf"),
    cell_seconds: float = 1.0,
) -> bool:
    """Checks every cell that the report lacks and, with a `machine`, times it. Returns whether it finished.

    Starts no cell after `deadline_s`, by `time.monotonic`. A fault that ends the GPU's context ends the run.
    """
    gpu = gpu or (Gpu() if DEVICE.type == "cuda" else Rehearsal())
    saved_s, ended = 0.0, True
    has = {cell.name for cell in report.cells}
    todo = [pair for pair in todo if Cell.of(*pair).name not in has]
    # Cells that did not end in an earlier run may not end in this one either.
    todo = sorted(todo, key=lambda pair: Cell.of(*pair).name in report.begun)
    for index, (operator, problem) in enumerate(todo):
        cell = Cell.of(operator, problem)
        if time.monotonic() > deadline_s:
            report.left_out += [f"{Cell.of(*pair).name}: no time left" for pair in todo[index:]]
            break
        append_line(folder / LINES, {"begin": cell.name})
        faulthandler.dump_traceback_later(CELL_S, exit=True)
        torch.manual_seed(seed)  # so that a cell can be rerun alone
        try:
            prepared = operator.prepare(problem)
            check(cell, prepared)
            if machine is None:
                for baseline in prepared.baselines.values():
                    baseline()
            elif cell.passed:
                measure(cell, prepared, machine, gpu, seconds=cell_seconds)
        except torch.OutOfMemoryError as error:
            report.left_out.append(f"{cell.name}: {str(error).splitlines()[0]}")
            append_line(folder / LINES, {"left": cell.name})
            gpu.free_cached()
            continue
        except Exception as error:  # anything a kernel or compiler raises is this cell's result; the others still run
            cell.passed, cell.fault = False, f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            faulthandler.cancel_dump_traceback_later()
            prepared = None  # free its memory for the next cell
        report.cells.append(cell)
        report.begun = [name for name in report.begun if name != cell.name]
        append_line(folder / LINES, {"cell": plain(cell)})
        print(f"  {'passed' if cell.passed else 'FAILED'}  {cell.name}  {cell.fault}", flush=True)
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            report.save(folder)
            saved_s = time.monotonic()
        if not cell.passed and not gpu.answers():
            report.left_out += [f"{Cell.of(*pair).name}: the GPU's context was lost" for pair in todo[index + 1 :]]
            ended = False
            break
    append_line(folder / LINES, {"left_out": report.left_out})
    report.save(folder)
    return ended


def _named(parser: argparse.ArgumentParser, what: str, names: Sequence[str], known: dict[str, Any]) -> list[Any]:
    for name in names:
        if name not in known:
            parser.error(f"there is no {what} {name!r}; known are {', '.join(map(repr, known))}")
    return [known[name] for name in names or known]


def main(words: Sequence[str] | None = None) -> int:
    about, _, more = __doc__.partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels.run", description=about, epilog=more, formatter_class=kind
    )
    parser.add_argument("--operator", nargs="+", default=[], help=f"of {', '.join(map(repr, all_operators()))}")
    parser.add_argument("--model", nargs="+", default=[], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", nargs="+", type=int, default=None, help=f"default: {TOKENS}")
    parser.add_argument("--world", nargs="+", type=int, default=None, help=f"default: {WORLDS}")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--peers", choices=("loopback", "pinned"), default="loopback")
    parser.add_argument("--quick", action="store_true", help="one model, three numbers of tokens, a world of 8")
    parser.add_argument(
        "--check", action="store_true", help="nothing is timed: the tiny model is checked, or those of --model"
    )
    parser.add_argument("--resume", action="store_true", help="keep the cells that --out has of this code and this GPU")
    parser.add_argument("--report", action="store_true", help="run nothing: rebuild both files of --out")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: time by the host's clock")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after this long")
    parser.add_argument("--seed", type=int, default=None, help="of the random numbers; default: a new one")
    parser.add_argument("--out", type=Path, default=Path("out/kernels"), help="folder of kernels.json and kernels.md")
    options = parser.parse_args(words)
    start_s = time.monotonic()
    if options.report:
        report = Report.load(options.out)
        report.save(options.out)
        print(report.text())
        return 0 if report.passed else 1
    operators = _named(parser, "operator", options.operator, all_operators())
    models = _named(parser, "model", options.model or (QUICK["models"] if options.quick else ()), MODELS)
    on_gpu = DEVICE.type == "cuda"
    device: Gpu = Rehearsal() if options.rehearse else Gpu()
    if options.rehearse and on_gpu:
        parser.error("--rehearse is for Triton's interpreter: hide the GPU by CUDA_VISIBLE_DEVICES=")
    if options.rehearse:
        try:
            refuse_results(options.out)
        except ValueError as error:
            parser.error(str(error))
    if options.peers == "pinned" and not on_gpu:
        parser.error("--peers pinned is host memory as a GPU sees it, and there is no GPU; use --peers loopback")
    if bad := [number for number in (*(options.tokens or ()), *(options.world or ())) if number < 1]:
        parser.error(f"--tokens and --world are numbers of at least 1, not {', '.join(map(str, bad))}")
    tokens = options.tokens or (QUICK["tokens"] if options.quick else TOKENS)
    timed = (on_gpu or options.rehearse) and not options.check
    if not on_gpu or (options.check and not options.model):
        models, tokens = [TINY], options.tokens or CHECK_TOKENS
        where = "A tiny model is checked" if on_gpu else "No GPU: a tiny model is checked in Triton's interpreter"
        print(f"{where}, and {'timed by the host' if timed else 'nothing is timed'}.", flush=True)
    worlds = options.world or (QUICK["worlds"] if options.quick else WORLDS)
    dtype = getattr(torch, options.dtype)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = Machine.measured(device, dtype=dtype, peers=options.peers) if timed else None
    now = {
        "rehearsal": options.rehearse,
        "hardware": hardware(),
        "gpu": device.about(),
        "reached": asdict(machine) if machine else None,
        "timed": timed,
        "peers": {"loopback": "loopback: no link in these figures", "pinned": "pinned host memory"}[options.peers],
        "dtype": options.dtype,
        "seed": torch.seed() if options.seed is None else options.seed,
        "versions": versions(),
        "commit": commit(),
        "source": source_digest(),
    }
    if not options.resume:
        (options.out / LINES).unlink(missing_ok=True)
    append_line(options.out / LINES, {"about": now})
    report = Report.load(options.out)
    kept, seed = len(report.cells), report.about["seed"] if options.seed is None else options.seed
    ended = run_cells(
        problems(operators, models, tokens, worlds, dtype=dtype, peers=options.peers),
        report,
        machine=machine,
        seed=seed,
        folder=options.out,
        gpu=device,
        deadline_s=start_s + options.seconds,
        cell_seconds=QUICK["cell_seconds"] if options.quick else 1.0,
    )
    if ended:
        append_line(options.out / LINES, {"end": True})
    print(report.text())
    failed = [cell for cell in report.cells if not cell.passed]
    print(
        f"{len(report.cells) - len(failed)} of {len(report.cells)} cells passed their check, "
        f"{('timed by the host' if options.rehearse else 'timed on the GPU') if timed else 'nothing was timed'}; "
        f"{len(report.left_out)} left out; {kept} kept from before; seed {seed}"
    )
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
