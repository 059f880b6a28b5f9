"""Long runs whose ranks stand still at random moments.

    python -m bench.suites.soak [--minutes 60] [--steps 300] [--seed 0] [--kinds split …] [--out FILE]

Each kind's run, by default those with the most waits, takes many steps while a rank now and then stops for up to a
second. It must end with the steps, files and, where the kind promises it, the bits of a run that nothing disturbed.
What its ranks have of memory, files and threads may not grow from its first half to its second. Else status 1.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from odc_triton.jobs.reports.report import table

from ..provenance import about, options_of, save_parts
from .kill_kinds import FEW, KINDS, Kind, prepare
from .kills import Run, models, steps

SOAKED = ["split", "prefixes", "hybrids", "grpo overlapped"]
PAUSE_S, APART_S = 1.0, 2.0  # the longest
GROWTH = {"bytes": 1.1, "files": 1.02, "threads": 1.05}  # the most of the medians: a checkpoint has some for a while


@dataclass
class Watch:
    """What the ranks had together, as often as it was looked at, by half of the run."""

    first: list[dict[str, int]] = field(default_factory=list)
    second: list[dict[str, int]] = field(default_factory=list)

    def look(self, ranks: list[psutil.Process], *, is_second: bool) -> None:
        found = {
            "bytes": sum(each.memory_full_info().uss for each in ranks),
            "files": sum(each.num_fds() for each in ranks),
            "threads": sum(each.num_threads() for each in ranks),
        }
        (self.second if is_second else self.first).append(found)

    def medians(self, name: str) -> list[float]:
        return [statistics.median(each[name] for each in half) for half in (self.first, self.second) if half]

    def grown(self) -> list[str]:
        of = {name: self.medians(name) for name in GROWTH}
        return [f"{name}: {each}" for name, each in of.items() if each[1:] and each[1] > GROWTH[name] * each[0]]


def disturbed(kind: Kind, folder: Path, out: Path, numbers: random.Random, last: int) -> tuple[int, str, int, Watch]:
    """A run until its end: its status, what it said, the pauses and what it took."""
    run, pauses, watch = Run.start(kind, folder, out), 0, Watch()
    while run.process.is_alive():
        time.sleep(numbers.uniform(0.0, APART_S))
        with contextlib.suppress(psutil.NoSuchProcess):
            if not (ranks := run.ranks(kind.ranks)):
                continue
            (victim := numbers.choice(ranks)).suspend()
            time.sleep(numbers.uniform(0.0, PAUSE_S))
            victim.resume()
            pauses += 1
            if done := steps(out):
                watch.look(ranks, is_second=2 * max(map(len, done.values())) > last)
    return *run.end(), pauses, watch


def soak(name: str, folder: Path, numbers: random.Random, last: int) -> dict[str, Any]:
    usual = KINDS[name]
    kind = replace(usual, command=usual.command.replace(FEW, f"--steps {last} --checkpoint-every 50"))
    want, got = folder / f"{name}, alone", folder / f"{name}, {numbers.random()}"
    if not want.exists() and (ended := Run.start(kind, folder, want).end())[0]:
        raise RuntimeError(f"{name}: the undisturbed run ended with status {ended[0]}: {ended[1][-3000:]}")
    begun_s = time.monotonic()
    status, said, pauses, watch = disturbed(kind, folder, got, numbers, last)
    wrong = watch.grown()
    if status:
        wrong.append(f"it ended with status {status}: {said[-3000:]}")
    elif steps(got) != steps(want):
        wrong.append("it has other steps")
    elif models(got, with_bits=kind.has_bits) != models(want, with_bits=kind.has_bits):
        wrong.append("it has other models")
    halves = {each: watch.medians(each) for each in GROWTH}
    return {"kind": name, "s": time.monotonic() - begun_s, "pauses": pauses, "halves": halves, "wrong": wrong}


def main() -> int:
    given = options_of(__doc__, minutes=60.0, seed=0, steps=300, kinds=SOAKED)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    numbers, found, end_s = random.Random(given.seed), [], time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        while not found or time.monotonic() < end_s:
            for name in given.kinds:
                found.append(soak(name, Path(scratch), numbers, given.steps))
                print(found[-1], flush=True)
    rows = []
    for name in given.kinds:
        own = [each for each in found if each["kind"] == name]
        of = [sum(each[key] for each in own) for key in ("s", "pauses")]
        rows.append([name, len(own), f"{of[0]:.0f}", of[1], sum(bool(each["wrong"]) for each in own)])
    print(table(rows, ("kind", "runs", "s", "pauses", "wrong")))
    if given.out is not None:
        save_parts(given.out, soak={"seed": given.seed, "runs": found, **about()})
    return int(any(row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
