"""Runs of every kind while their processes are killed, stopped, frozen or asked to end, at random moments.

    python -m bench.suites.kills [--strikes 300] [--seed 0] [--kinds sft split …] [--within-s 10] [--out FILE]

A strike ends a run, which must name the rank, end all its processes in time and leave nothing that others could see.
The same command then goes on from a checkpoint no older than the run's interval. After a few strikes the run may end:
each of its steps must be in its metrics once, and its models have the files, and where the kind promises it the bits,
of a run that nothing disturbed. Else status 1.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from odc_triton.jobs.launcher import launch
from odc_triton.jobs.reports.report import table
from odc_triton.tools.cli.command import main as command

from ..provenance import about, options_of, save_parts
from .kill_checks import (
    CTRL_C,
    FREEZE,
    KILL,
    LAUNCHER,
    STOPS,
    TERM,
    Lines,
    differences,
    held,
    is_right_end,
    left_of,
    lost_lines,
    metrics_lines,
    own_processes,
)
from .kill_kinds import KINDS, MINUTES, Kind, prepare

LONG_S = 600.0
STRIKES_OF_A_RUN = 4
GRACE_S = launch._ALONE_S + launch._GRACE_S  # from a failure to the launcher's SIGKILL
HUNG, SAVED = "to end: killed", ", saved in "  # words of the launcher and of a run
HOW = {KILL: 50, LAUNCHER: 15, TERM: 15, CTRL_C: 15, FREEZE: 5}  # how often
_LOOK_S = 0.1
_PRELOAD = ["bitsandbytes", "peft", "odc_triton.train.sft", "odc_triton.train.grpo", "odc_triton.train.dpo"]
_PRELOAD += [f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3_moe", "qwen3_5", "qwen2_5_vl")]


def _serve(kind: Kind, arguments: list[str], scratch: Path, said: Path, begun: Any) -> None:
    """`odc-triton` in this new process, without its imports' seconds."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a program that has just begun
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    with said.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if kind.hosts > 1:
        environment, of_each = launch._environment, kind.ranks // kind.hosts
        launch._environment = lambda rank, ranks: environment(rank, ranks) | {"ODC_HOST": str(rank // of_each)}
    begun.send(None)
    sys.argv = ["odc-triton", *arguments]
    sys.exit(command())


@dataclass
class Run:
    """One start of a kind's command. `every`, `names`: the processes and names that `look` has seen."""

    process: Any
    said: Path
    scratch: Path
    begun_s: float
    every: set[psutil.Process] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    @classmethod
    def start(cls, kind: Kind, folder: Path, out: Path) -> Run:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, __name__])
        said, (begins, begun) = folder / "said.txt", context.Pipe(duplex=False)  # an Event's wait ends as clocks change
        said.write_bytes(b"")
        scratch = Path(tempfile.mkdtemp(dir=folder))
        process = context.Process(target=_serve, args=(kind, kind.arguments(folder, out), scratch, said, begun))
        process.start()
        begun.close()
        if not begins.poll(LONG_S):
            raise RuntimeError("the process did not begin")
        begins.recv()  # EOFError if it has ended
        return cls(process, said, scratch, time.monotonic())

    def ranks(self, count: int) -> list[psutil.Process]:
        """By their numbers; none while they start or end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            ranks = [each for each in children if not any("resource_tracker" in word for word in each.cmdline())]
            found = sorted(ranks, key=lambda each: (each.create_time(), each.pid))
            return found if len(found) == count else []
        return []

    def wait_for(self, seconds: float) -> bool:
        """Until then; whether it runs."""
        self.process.join(max(0.0, self.begun_s + seconds - time.monotonic()))
        return self.process.is_alive()

    def look(self) -> None:
        own = own_processes(self.process.pid, self.scratch)
        self.every |= {*own}
        self.names |= held(own)

    def end(self, *, watch: Callable[[], None] = lambda: None, most_s: float = LONG_S) -> tuple[int | None, str]:
        """Its status, None if it had to be killed, and what it said. Calls `watch` about every `_LOOK_S` until then."""
        end_s = time.monotonic() + most_s
        while self.process.is_alive() and time.monotonic() < end_s:
            watch()
            self.process.join(_LOOK_S)
        status = self.process.exitcode
        if status is None:
            self.kill()
        return status, self.said.read_text(errors="replace")

    def kill(self) -> int:
        """How many of its processes still were there."""
        alive = own_processes(self.process.pid, self.scratch)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.join()
        return len(alive)


def strike(
    kind: Kind, folder: Path, out: Path, wanted: Path, numbers: random.Random, longest_s: float, within_s: float
) -> dict[str, Any] | None:
    """Starts a run, strikes, and says what was wrong then; None if it ended before that."""
    run, wait_s = Run.start(kind, folder, out), numbers.uniform(0.0, longest_s)
    how, rank = numbers.choices([*HOW], weights=[*HOW.values()])[0], numbers.randrange(kind.ranks)
    if how == FREEZE and not kind.resumes:  # torch's own waits there are long
        how = KILL
    if how in (KILL, FREEZE):
        while run.wait_for(wait_s := wait_s + 0.02) and not run.ranks(kind.ranks):
            pass
    run.wait_for(wait_s)
    ranks = run.ranks(kind.ranks)
    run.look()
    late, struck_s = is_done(kind, out, wanted, run, left=1 + (how in STOPS)), time.monotonic()
    try:
        if not run.process.is_alive() or (how in (KILL, FREEZE) and not ranks):
            raise ProcessLookupError
        if how in STOPS:
            (os.killpg if how == CTRL_C else os.kill)(run.process.pid, STOPS[how])
        else:
            victim = psutil.Process(run.process.pid) if how == LAUNCHER else ranks[rank]
            victim.send_signal(signal.SIGSTOP if how == FREEZE else signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):  # it has ended, or is about to
        status, said = run.end()
        return None if status == 0 else {"how": "nothing", "status": status, "wrong": [said[-2000:]]}
    status, said = run.end(watch=run.look)
    psutil.wait_procs(run.every, timeout=3 * within_s)
    ended_s, alive, wrong = time.monotonic() - struck_s, run.kill(), list[str]()
    # A sweep misses a frozen rank once the others have trained the other runs.
    if alive or ended_s > within_s + (how == FREEZE) * (60 * MINUTES + GRACE_S + longest_s):
        wrong.append(f"it ended after {ended_s:.1f} s, {alive} processes not at all")
    if not is_right_end(how, rank, status, said, is_ours=kind.resumes, is_done=late):
        wrong.append(f"{how} {rank}, status {status}, isn't what it said: {said[-1500:]}")
    if how != FREEZE and HUNG in said:
        wrong.append(f"a rank hung: {said[-1500:]}")
    wrong += [f"{left} stayed" for left in left_of(run.names)]
    files = [path.name for path in run.scratch.iterdir() if not path.name.startswith("torchelastic_")]  # torchrun's
    if how != LAUNCHER and files:
        wrong.append(f"{sorted(files)} stayed in the folder of temporary files")
    shutil.rmtree(run.scratch)
    found = {"how": how, "rank": rank, "status": status, "saved": SAVED in said}
    return found | {"after_s": struck_s - run.begun_s, "ended_s": ended_s, "wrong": wrong}


def is_done(kind: Kind, out: Path, wanted: Path, run: Run, *, left: int) -> bool:
    """At most `left` lines of its metrics are to come."""
    if not kind.resumes:
        return kind.last in run.said.read_text(errors="replace")
    found = metrics_lines(out)
    return all(len(found.get(name, ())) >= len(lines) - left for name, lines in metrics_lines(wanted).items())


def disturb(name: str, folder: Path, numbers: random.Random, strikes: int, within_s: float) -> dict[str, Any]:
    """That many strikes on runs of a kind, each of which ends at last."""
    kind, found, differ = KINDS[name], list[dict[str, Any]](), list[str]()
    undisturbed = folder / f"{name}, undisturbed"
    first = Run.start(kind, folder, undisturbed)
    status, said = first.end()
    took_s = time.monotonic() - first.begun_s
    if status != 0:
        raise RuntimeError(f"{name}: the undisturbed run ended with status {status}: {said[-3000:]}")
    runs = 0
    while len(found) < strikes:
        out, runs, before, interval = folder / f"{name}, {runs}", runs + 1, Lines(), kind.interval
        for _ in range(min(STRIKES_OF_A_RUN, strikes - len(found))):
            if (struck := strike(kind, folder, out, undisturbed, numbers, took_s, within_s)) is None:
                break
            now = metrics_lines(out)
            struck["wrong"] += lost_lines(before, now, interval=interval)
            before, interval = now, 0 if struck.get("saved") else kind.interval
            found.append(struck)
            print(f"{name}: {struck}", flush=True)
        status, said = Run.start(kind, folder, out).end()
        is_aborted = kind.last != "" and kind.last in said and "SIGABRT" in said  # by torch's gloo, with all work done
        if status != 0 and not is_aborted:
            differ.append(f"run {runs}: status {status}: {said[-2000:]}")
        elif kind.resumes:
            wrong = lost_lines(before, metrics_lines(out), interval=interval)
            wrong += differences(out, undisturbed, with_bits=kind.has_bits)
            differ += [f"run {runs}: {each}" for each in wrong]
        shutil.rmtree(out, ignore_errors=True)  # a program has none
    for problem in differ:
        print(f"{name}: {problem}", flush=True)
    return {"kind": name, "undisturbed_s": took_s, "runs": runs, "strikes": found, "differ": differ}


def main() -> int:
    given = options_of(__doc__, strikes=300, seed=0, kinds=(*KINDS,), within_s=10.0)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = []
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        for number, name in enumerate(given.kinds):
            strikes = (given.strikes + number) // len(given.kinds)
            numbers = random.Random(f"{given.seed} {name}")
            found.append(disturb(name, Path(scratch), numbers, strikes, given.within_s))
    rows = []
    for of in found:
        how = Counter(each["how"] for each in of["strikes"])
        longest_s = max((each.get("ended_s", 0.0) for each in of["strikes"] if each["how"] != FREEZE), default=0.0)
        wrong = sum(bool(each["wrong"]) for each in of["strikes"])
        row = [of["kind"], of["runs"], *(how[each] for each in HOW), f"{longest_s:.1f}", wrong, len(of["differ"])]
        rows.append(row)
    print(table(rows, ("kind", "runs", *HOW, "longest end, s", "ended wrong", "other at the end")))
    if given.out is not None:
        save_parts(given.out, kills={"seed": given.seed, "kinds": found, **about()})
    return int(any(row[-2] or row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
