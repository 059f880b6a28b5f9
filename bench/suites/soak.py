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
import shutil
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
from .kill_checks import differences, metrics_lines
from .kill_kinds import FEW, KINDS, Kind, prepare
from .kills import LONG_S, Run

SOAKED = ["split", "prefixes", "hybrids", "grpo overlapped"]
PAUSE_S, APART_S = 1.0, 2.0  # the longest
FEW_LOOKS = 3  # of each half
GROWTH = {"bytes": 1.1, "files": 1.02, "threads": 1.05}  # the most of the medians: a checkpoint has some for a while


@dataclass
class Watch:
    """What the ranks had together, as often as it was looked at, by half of the run. bytes: with their part of what
    they share.
    """

    first: list[dict[str, int]] = field(default_factory=list)
    second: list[dict[str, int]] = field(default_factory=list)

    def look(self, ranks: list[psutil.Process], *, is_second: bool) -> None:
        found = {
            "bytes": sum(each.memory_full_info().pss for each in ranks),
            "files": sum(each.num_fds() for each in ranks),
            "threads": sum(each.num_threads() for each in ranks),
        }
        (self.second if is_second else self.first).append(found)

    def medians(self, name: str) -> list[float]:
        return [statistics.median(each[name] for each in half) for half in (self.first, self.second) if half]

    def wrong(self) -> list[str]:
        looks = [len(self.first), len(self.second)]
        if min(looks) < FEW_LOOKS:
            return [f"it was looked at {looks} times"]
        of = {name: self.medians(name) for name in GROWTH}
        return [f"{name}: {each}" for name, each in of.items() if each[1] > GROWTH[name] * each[0]]


def disturbed(run: Run, kind: Kind, out: Path, numbers: random.Random, last: int) -> tuple[int, Watch]:
    """Disturbs a run until its end, or for too long. Returns the pauses and what it took."""
    pauses, watch = 0, Watch()
    while run.wait_for(time.monotonic() - run.begun_s + numbers.uniform(0.0, APART_S)):
        if time.monotonic() - run.begun_s > most_s(last):
            break
        with contextlib.suppress(psutil.NoSuchProcess):
            if not (ranks := run.ranks(kind.ranks)):
                continue
            (victim := numbers.choice(ranks)).suspend()
            time.sleep(numbers.uniform(0.0, PAUSE_S))
            victim.resume()
            pauses += 1
            if done := metrics_lines(out):
                watch.look(ranks, is_second=2 * max(map(len, done.values())) > last)
    return pauses, watch


def most_s(steps: int) -> float:
    """What a run of so many may take."""
    return LONG_S + 4 * steps


def soak(name: str, folder: Path, numbers: random.Random, last: int) -> dict[str, Any]:
    usual = KINDS[name]
    kind = replace(usual, command=usual.command.replace(FEW, f"--steps {last} --checkpoint-every 50"))
    want, got = folder / f"{name}, alone", folder / f"{name}, disturbed"
    if not want.exists() and (ended := Run.start(kind, folder, want).end(most_s=most_s(last)))[0] != 0:
        raise RuntimeError(f"{name}: the undisturbed run ended with status {ended[0]}: {ended[1][-3000:]}")
    run = Run.start(kind, folder, got)
    pauses, watch = disturbed(run, kind, got, numbers, last)
    status, said = run.end(most_s=0.0)
    wrong = [] if pauses else ["no rank stood still"]
    if status != 0:
        wrong.append(f"it ended with status {status}: {said[-3000:]}")
    else:
        wrong += watch.wrong() + differences(got, want, with_bits=kind.has_bits)
    shutil.rmtree(got)
    halves = {each: watch.medians(each) for each in GROWTH}
    return {"kind": name, "s": time.monotonic() - run.begun_s, "pauses": pauses, "halves": halves, "wrong": wrong}


def main() -> int:
    given = options_of(__doc__, minutes=60.0, seed=0, steps=300, kinds=SOAKED)
    if wrong := {*given.kinds} - {name for name, kind in KINDS.items() if FEW in kind.command}:
        raise SystemExit(f"--kinds has {sorted(wrong)}, which are none of kill_kinds.py, or have steps of their own")
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
