"""A sweep: runs of `train sft` over one frozen base, read from a YAML file. Imports no torch.

model: FOLDER            # options of `train sft` that all runs have
data: chats.jsonl
lora_rank: 16
grid:                    # each combination is a run
  lr: [1.0e-4, 3.0e-4]
  seed: [0, 1]
runs:                    # rows of options; each is combined with the grid. A row may have a name
  - {name: wide, lora_rank: 64}
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..options.config_file import checked_options, read_pairs, replaced
from ..options.options import REQUIRED, flag, option, plain_paths, read_options
from .sft_options import SftOptions

_OF_THE_SWEEP = ("out", "resume", "replicas", "run_group", "init", "push_to_hub")


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Runs over one base."""

    out: str = option(REQUIRED, "folder with a folder for each run, and the table and chart of all")
    ranks_per_run: int = option(1, "ranks that train a run together; its adapters are sharded over them")
    resume: Literal["never", "auto"] = option("never", "auto: continue all runs that are in --out where they stand")

    def __post_init__(self) -> None:
        plain_paths(self, "out")
        if self.ranks_per_run < 1:
            raise ValueError(f"--ranks-per-run is {self.ranks_per_run}; give at least 1")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """`runs`: the options of each, by its name, which is that of its folder in `out`. `varied`: those that differ."""

    out: str
    ranks_per_run: int
    runs: dict[str, SftOptions]
    varied: tuple[str, ...]

    @property
    def timeout_minutes(self) -> float:
        return next(iter(self.runs.values())).timeout_minutes


def read_sweep(path: str | os.PathLike, options: SweepOptions) -> Sweep:
    """The sweep in the file `path`. Raises ValueError for all that can be known to be wrong before data are read."""
    parts = {str(key).replace("-", "_"): (key, value, text) for key, value, text in read_pairs(path)}
    grid, rows = ((parts.pop(name, None) or (name, None))[1] for name in ("grid", "runs"))
    if given := parts.keys() & {"ranks", *(each.name for each in fields(SweepOptions))}:
        raise ValueError(f"{path} has {', '.join(sorted(given))}: give {flag(min(given))} on the command line")
    if "run_name" in parts:
        raise ValueError(f"{path}: run_name would be that of all runs: give it in rows, or leave it out")
    common = checked_options(path, [*parts.values()], SftOptions)
    grid, rows = {} if grid is None else grid, [{}] if rows is None else rows
    if not isinstance(grid, dict) or not all(isinstance(each, list) and each for each in grid.values()):
        raise ValueError(f"{path}: grid is {grid!r}: give options with lists of values, such as 'lr: [1.0e-4, 3.0e-4]'")
    if not isinstance(rows, list) or not rows or not all(isinstance(each, dict) for each in rows):
        raise ValueError(f"{path}: runs is {rows!r}: give a list of rows of options, such as '- lr: 1.0e-4'")
    if not grid and rows == [{}]:
        raise ValueError(f"{path} has one run: give a grid of lists of options, or runs, a list of rows of options")
    runs: dict[str, SftOptions] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number} of runs"
        own = checked_options(where, [(*each, None) for each in row.items()], SftOptions, name=str)
        named = own.pop("name", None)
        for values in itertools.product(*grid.values()):
            cell = checked_options(f"{path}: grid", [*zip(grid, values, itertools.repeat(None))], SftOptions)
            if twice := own.keys() & cell.keys():
                raise ValueError(f"{where} and grid both have {', '.join(sorted(twice))}: keep one")
            changed = (own if named is None else {}) | cell
            name = _as_folder(",".join([named] * bool(named) + [f"{k}={_brief(v)}" for k, v in changed.items()]))
            if name in runs or not name:
                raise ValueError(f"{where}: two runs are called {name!r}: give each value once, and rows a name")
            if name in ("data", "sweep.json", "sweep.html") or len(name.encode()) > 200:  # file systems take 255
                raise ValueError(f"{where}: no run's folder can be called {name}: give the row a short name")
            runs[name] = _run(f"{where}, run {name}", replaced(SftOptions, common, own | cell), name, options)
    first, theirs = next((run, same_of(run)) for run in runs.values())
    for name, run in runs.items():
        for what, mine in same_of(run).items():
            if mine != theirs[what]:
                raise ValueError(
                    f"{path}: run {name} has {flag(what)} {mine} and run {next(iter(runs))} has {theirs[what]}: "
                    f"runs of a sweep share one base and one deadline; write another sweep"
                )
    names = [each.name for each in fields(SftOptions) if each.name not in ("out", "run_name")]
    varied = tuple(name for name in names if any(getattr(run, name) != getattr(first, name) for run in runs.values()))
    return Sweep(out=options.out, ranks_per_run=options.ranks_per_run, runs=runs, varied=varied)


def same_of(options: SftOptions) -> dict[str, Any]:
    """What all runs have in common: of the base, and the deadline."""
    model = os.path.realpath(options.model) if os.path.exists(options.model) else options.model
    return {"model": model} | {name: getattr(options, name) for name in ("quantize", "dtype", "timeout_minutes")}


def _run(where: str, given: dict[str, Any], name: str, options: SweepOptions) -> SftOptions:
    given = {key: value for key, value in given.items() if value is not None}
    if refused := [each for each in _OF_THE_SWEEP if each in given]:
        raise ValueError(f"{where}: {', '.join(refused)} can't be an option of a run in a sweep: leave it out")
    group = {"run_group": Path(options.out).name} if {*given.get("report_to", ())} - {"none"} else {}
    given = given | group | {"out": str(Path(options.out) / name), "resume": options.resume}
    try:
        run = read_options(SftOptions, given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not run.lora_rank:
        raise ValueError(f"{where} has no --lora-rank: runs of a sweep share a frozen base, and train adapters")
    return run


def _brief(value: Any) -> str:
    return "none" if value is None else "+".join(map(str, value if isinstance(value, list) else [value]))


def _as_folder(name: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "_", name).strip(".")
