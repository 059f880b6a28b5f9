"""The stages that run the project's own commands: training, kernels, steps, links, memory checks.

Each is a series of named runs, which write to the stage's `folder`. A run's findings are written down while it goes on,
and a run that passed is not repeated.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...provenance import read_lines
from .outcomes import Ledger
from .process import run
from .tests import tail

CELLS = "kernels.jsonl"
FALLS_BY = 0.9  # mean of the last ten losses over that of the first ten: a model that learns nothing stays at 1.0
_AT_ONCE = 10
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_MEMCHECK_SHARE = 0.7  # of the time, for starting cells: one may take long under the tool
_KERNELS_END_S = 15.0  # for a cell that has begun, and the report, but no more than this part of the time
_KERNELS_END_SHARE = 0.2
_RESTARTS = 4  # after a lost context or a cell that hung


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one stage, within its time."""

    ledger: Ledger
    stage: str
    environment: dict[str, str]
    deadline_s: float  # by time.monotonic
    again: bool = False

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def run(
        self,
        name: str,
        command: list[str],
        read_data: Callable[[], Any],
        passes: Callable[[Any, int | None], bool],
        **environment: str,
    ) -> bool | None:
        """Whether this run passed, now or before; None if its time ran out. `read_data`: what it has found so far, None
        if nothing; `passes` gets that and the exit code, which is None if the time ran out.
        """
        before = self.ledger.stage(self.stage).runs.get(name)
        if before is not None and before["passed"] and not self.again:
            return True
        begin_s, last = time.monotonic(), None

        def watch() -> None:
            nonlocal last
            data = read_data()
            if data is not None and data != last:
                last = data
                self.ledger.add("run", stage=self.stage, name=name, passed=None, data=data)

        code, text = run(command, self.environment | environment, max(self.left_s, 1), watch)
        passed = passes(last, code)
        record = {"name": name, "passed": passed, "cut": code is None, "seconds": round(time.monotonic() - begin_s, 1)}
        said = "" if passed and code == 0 else tail(text)
        self.ledger.add("run", stage=self.stage, **record, exit=code, data=last, text=said)
        return None if code is None and not passed else passed


def ending(results: Iterable[bool | None]) -> dict[str, Any]:
    """A stage's result from those of all its runs; starts every run, even after one that failed."""
    results = list(results)
    return {"passed": all(results), "cut": None in results and False not in results}


def _json(path: Path) -> Callable[[], Any]:
    """Reads a file that a command updates by renaming another one to it."""
    return lambda: json.loads(path.read_text()) if path.exists() else None


def _odc(*words: str) -> list[str]:
    return [sys.executable, "-m", "odc_triton.cli", *words]


@dataclass(frozen=True, kw_only=True)
class Training:
    """`modules`: a folder of the standard library to learn from, "" for all of it. `samples`: per step, all ranks
    together. `runs`: by name, the number of processes and further options.
    """

    modules: str
    records: int
    config: dict[str, Any]
    samples: int
    words: tuple[str, ...]
    runs: dict[str, tuple[int, tuple[str, ...]]]


def run_train(runs: Runs, training: Training, folder: Path) -> dict[str, Any]:
    """`odc-triton train sft` on the standard library's source code; its loss curve, step by step."""
    from ...stdlib_corpus import build_corpus, write_text

    # Real text, the same on every machine with this Python.
    records, _ = build_corpus(Path(sysconfig.get_path("stdlib")) / training.modules)
    records = random.Random(0).sample(records, min(training.records, len(records)))
    write_text(folder, records, training.config)
    words = ["--data", folder / "data.jsonl", "--init", folder / "config.json", "--tokenizer"]
    words += [folder / "tokenizer.json", *training.words]
    results = []
    for name, (ranks, changes) in training.runs.items():
        out = folder / name.replace(" ", "-")
        more = ["--out", out, "--ranks", ranks, "--samples-per-rank", training.samples // ranks, *changes]
        command = _odc("train", "sft", *map(str, [*words, *more]))
        results.append(runs.run(name, command, _curve(out), learned, ODC_TRITON_CACHE=str(folder / "cache")))
    return ending(results)


def _curve(out: Path) -> Callable[[], dict[str, Any] | None]:
    def losses() -> dict[str, Any] | None:
        found = [record["loss"] for record in read_lines(out / "metrics.jsonl") if "loss" in record]
        if not found:
            return None
        first, last = (sum(part) / len(part) for part in (found[:_AT_ONCE], found[-_AT_ONCE:]))
        return {"first": round(first, 4), "last": round(last, 4), "losses": [round(loss, 4) for loss in found]}

    return losses


def learned(data: dict[str, Any] | None, code: int | None) -> bool:
    """Whether it ended with losses clearly below its first ones."""
    return code == 0 and data is not None and data["last"] <= FALLS_BY * data["first"]


def run_kernels(runs: Runs, out: Path, words: Iterable[str]) -> dict[str, Any]:
    """bench.kernels.run, restarted if a hang or a lost context ended it, to continue with other cells. Passes if all
    cells that it reached are right; running out of time is no failure, because there are more cells than time.
    """
    if runs.again:
        (out / CELLS).unlink(missing_ok=True)
    code: int | None = None
    for _ in range(_RESTARTS + 1):
        seconds = runs.left_s - min(_KERNELS_END_S, _KERNELS_END_SHARE * runs.left_s)
        if seconds < 1:
            break
        command = [
            sys.executable,
            "-m",
            "bench.kernels.run",
            "--resume",
            "--seconds",
            f"{seconds:.0f}",
            "--out",
            str(out),
        ]
        code, text = run([*command, *words], runs.environment, runs.left_s)
        ended = bool(cells := read_lines(out / CELLS)) and "end" in cells[-1]
        runs.ledger.add("said", stage=runs.stage, text=tail(text) if code != 0 or not ended else "")
        if ended or code is None:
            break
    cells = [record["cell"] for record in read_lines(out / CELLS) if "cell" in record]
    right = bool(cells) and all(cell["passed"] for cell in cells)
    return {"passed": code in (0, None) and right, "cut": not cells, "cells": len(cells)}


def run_checked(runs: Runs, checked: dict[str, tuple[str, ...]], folder: Path) -> dict[str, Any]:
    """`bench.kernels.run --check`, once for each row of options."""
    results = []
    for number, (name, words) in enumerate(checked.items()):
        out = folder / str(number)
        command = [sys.executable, "-m", "bench.kernels.run", "--check", "--out", str(out), *words]
        results.append(runs.run(name, command, _cells(out), lambda _, code: code == 0))
    return ending(results)


def _cells(out: Path) -> Callable[[], dict[str, Any] | None]:
    def cells() -> dict[str, Any] | None:
        found = [record["cell"] for record in read_lines(out / CELLS) if "cell" in record]
        wrong = [f"{c['operator']}, {c['layer']}, {c['tokens']} tokens: {c['fault']}" for c in found if not c["passed"]]
        return {"cells": len(found), "wrong": wrong} if found else None

    return cells


def run_steps(
    runs: Runs,
    config: dict[str, Any],
    given: Iterable[str],
    steps: dict[str, tuple[int, tuple[str, ...]]],
    folder: Path,
) -> dict[str, Any]:
    """`odc-triton profile` for each of `steps`: processes, and how the model is changed. `given`: its other options."""
    results, init = [], folder / "config.json"
    init.write_text(json.dumps(config))
    for number, (name, (ranks, changes)) in enumerate(steps.items()):
        out = folder / str(number)
        command = _odc("profile", "--init", str(init), "--out", str(out), "--ranks", str(ranks), *changes, *given)
        results.append(runs.run(name, command, _json(out / "profile.json"), _found))
    return ending(results)


def _found(data: Any, code: int | None) -> bool:
    return code == 0 and data is not None


def _found_something(data: Any, code: int | None) -> bool:
    """For commands that measure round after round: running out of time is no failure."""
    return code in (0, None) and data is not None


def long_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """LongAlign's lengths (mean 16.5 K, at most 64 K tokens), scaled down to `longest`: log-normal."""
    generator = random.Random(seed)
    middle = math.log(longest / 6.2)  # the ratio of LongAlign's longest to its median
    return [min(max(int(generator.lognormvariate(middle, 1.0)), 16), longest) for _ in range(count)]


def run_lengths(
    runs: Runs, config: dict[str, Any], given: Iterable[str], folder: Path, *, ranks: int, longest: int
) -> dict[str, Any]:
    """`odc-triton bench --lengths` on `ranks` GPUs, as far as it gets in the time. `given`: its other options."""
    init, lengths, out = (folder / name for name in ("config.json", "lengths.txt", "out"))
    init.write_text(json.dumps(config))
    lengths.write_text("".join(f"{length}\n" for length in long_lengths(256, longest)))
    command = _odc("bench", "--lengths", str(lengths), "--init", str(init), "--out", str(out))
    command += ["--ranks", str(ranks), *given]
    return ending([runs.run("lengths", command, _json(out / "lengths.json"), _found_something)])


def run_links(runs: Runs, given: Iterable[str], folder: Path) -> dict[str, Any]:
    """bench.suites.links, as far as it gets in the time."""
    command = [sys.executable, "-m", "bench.suites.links", "--out", str(folder), *given]
    return ending([runs.run("links", command, _json(folder / "links.json"), _found_something)])


def find_tool(environment: dict[str, str]) -> str | None:
    """compute-sanitizer, from the PATH or the CUDA toolkit's usual places; None if it is not there."""
    homes = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [environment.get("PATH", os.defpath), *(os.path.join(home, "bin") for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run_memcheck(runs: Runs) -> dict[str, Any]:
    """`bench.kernels.run --check` under memcheck, every tensor a separate allocation. Passes without the tool."""
    tool = find_tool(runs.environment)
    if tool is None:
        return {"passed": True, "cut": False, "note": "not run: compute-sanitizer is not present"}
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            tool,
            "--tool",
            "memcheck",
            "--error-exitcode",
            "99",
            sys.executable,
            "-m",
            "bench.kernels.run",
            "--check",
        ]
        command += ["--world", "2", "--seconds", f"{runs.left_s * _MEMCHECK_SHARE:.0f}", "--out", scratch]
        code, text = run(command, runs.environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, runs.left_s)
    summary = _SUMMARY.search(text)
    data = {"errors": int(summary.group(1)) if summary else None, "text": tail(text)}
    record = {"passed": code == 0 and data["errors"] == 0, "cut": code is None}
    seconds = round(time.monotonic() - begin_s, 1)
    runs.ledger.add("run", stage=runs.stage, name="memcheck", **record, seconds=seconds, exit=code, data=data)
    return record
