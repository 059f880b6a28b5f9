"""Runs of every kind while their processes are killed, stopped, frozen or asked to end, at random moments.

    python -m bench.suites.kills [--strikes 300] [--seed 0] [--kinds sft split …] [--within-s 10] [--out FILE]

A strike ends a run, which must name the rank, end all its processes in time and leave nothing that others could see.
The same command then goes on. After a few strikes the run may end: each of its steps must be in its metrics once, and
its models have the files, and where the kind promises it the bits, of a run that nothing disturbed. Else status 1.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from odc_triton.jobs.launcher import launch
from odc_triton.jobs.reports.report import table
from odc_triton.tools.cli.command import main as command

from ..provenance import about, options_of, save_parts
from .kill_kinds import KINDS, MINUTES, Kind, prepare

LONG_S = 600.0
STRIKES_OF_A_RUN = 4
KILL, LAUNCHER, TERM, CTRL_C, FREEZE = "a rank", "the launcher", "SIGTERM", "Ctrl-C", "a frozen rank"
HOW = {KILL: 50, LAUNCHER: 15, TERM: 15, CTRL_C: 15, FREEZE: 5}  # how often
STOPS = {TERM: signal.SIGTERM, CTRL_C: signal.SIGINT}
_PRELOAD = ["bitsandbytes", "peft", "odc_triton.train.sft", "odc_triton.train.grpo", "odc_triton.train.dpo"]
_PRELOAD += [f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3_moe", "qwen3_5", "qwen2_5_vl")]


def _serve(kind: Kind, arguments: list[str], scratch: Path, said: Path, begun: Any) -> None:
    """`odc-triton` in this new process, without its imports' seconds."""
    os.setsid()
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
    """One start of a kind's command."""

    process: Any
    said: Path
    scratch: Path
    begun_s: float

    @classmethod
    def start(cls, kind: Kind, folder: Path, out: Path) -> Run:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, __name__])
        said, (begins, begun) = folder / "said.txt", context.Pipe(duplex=False)  # an Event's wait ends as clocks change
        said.write_bytes(b"")
        scratch = Path(tempfile.mkdtemp(dir=folder))
        process = context.Process(target=_serve, args=(kind, kind.arguments(folder, out), scratch, said, begun))
        process.start()
        if not begins.poll(LONG_S):
            raise RuntimeError("the process did not begin")
        return cls(process, said, scratch, time.monotonic())

    def ranks(self, count: int) -> list[psutil.Process]:
        """By their numbers; none while they start or end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            found = sorted(children, key=lambda each: (each.create_time(), each.pid))
            return found if len(found) == count else []
        return []

    def wait_for(self, seconds: float) -> bool:
        """Until then; whether it runs."""
        self.process.join(max(0.0, self.begun_s + seconds - time.monotonic()))
        return self.process.is_alive()

    def end(self) -> tuple[int, str]:
        """Its status and what it said."""
        self.process.join(LONG_S)
        return self.process.exitcode, self.said.read_text(errors="replace")


def held(processes: list[psutil.Process]) -> set[str]:
    """Names that others could see, of these processes alone: files in /dev/shm, and abstract sockets' addresses."""
    found, sockets = set(), set()
    for each in processes:
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{each.pid}")
            sockets |= {os.readlink(file) for file in (folder / "fd").iterdir()}
            found |= {line.split()[5] for line in (folder / "maps").read_text().splitlines() if "/dev/shm/" in line}
    return found | {address for inode, address in _sockets() if f"socket:[{inode}]" in sockets}


def _sockets() -> list[tuple[str, str]]:
    """Inode and address of each abstract one."""
    lines = map(str.split, Path("/proc/net/unix").read_text().splitlines())
    return [(words[6], words[7]) for words in lines if len(words) > 7 and words[7].startswith("@")]


def left_of(names: set[str]) -> list[str]:
    return sorted(names & {*map(str, Path("/dev/shm").iterdir()), *(address for _, address in _sockets())})


def models(out: Path, *, with_bits: bool) -> dict[str, bytes]:
    """Of each file of weights that a run ends with, what is in it."""
    found = {str(path.relative_to(out)): path for path in out.rglob("*.safetensors") if "checkpoints" not in path.parts}
    return {name: path.read_bytes() if with_bits else b"" for name, path in found.items()}


def steps(out: Path) -> dict[str, list[int]]:
    """Of each run in it, the steps that its metrics have."""
    lines = {path: path.read_text().splitlines() for path in sorted(out.rglob("metrics.jsonl"))}
    return {str(path.relative_to(out)): [json.loads(line)["step"] for line in of] for path, of in lines.items()}


def is_named(kind: Kind, how: str, rank: int, status: int, said: str) -> bool:
    if how == KILL:
        ours = rf"\brank {rank} failed first: its process was killed by SIGKILL"
        torchruns = rf"\(exitcode: -9\) local_rank: {rank} |\brank\s*: {rank} \(local_rank"
        return status != 0 and re.search(ours if kind.resumes else torchruns, said) is not None
    if how == FREEZE:
        waits = rf"\bfor ranks? {rank}\b|\brank {rank} failed first: its process is stopped"
        return status != 0 and re.search(waits, said) is not None
    if how in STOPS:
        number = STOPS[how]
        return status in (0, 1, 128 + number, -number)
    return True


def strike(
    kind: Kind, folder: Path, out: Path, numbers: random.Random, longest_s: float, within_s: float
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
    launcher = psutil.Process(run.process.pid) if run.process.is_alive() else None
    ranks = run.ranks(kind.ranks)
    if launcher is None or (how in (KILL, FREEZE) and not ranks):
        return None if run.end()[0] == 0 else {"how": "nothing", "wrong": [run.end()[1][-2000:]]}
    try:
        every = [launcher, *launcher.children(recursive=True)]
        names, struck_s = held(every), time.monotonic()
        if how in STOPS:
            (os.killpg if how == CTRL_C else os.kill)(run.process.pid, STOPS[how])
        else:
            victim = launcher if how == LAUNCHER else ranks[rank]
            victim.send_signal(signal.SIGSTOP if how == FREEZE else signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):  # it has just ended
        run.end()
        return None
    status, said = run.end()
    _, alive = psutil.wait_procs(every, timeout=3 * within_s)
    for each in alive:
        each.kill()
    ended_s, wrong = time.monotonic() - struck_s, []
    if alive or ended_s > within_s + (120 * MINUTES if how == FREEZE else 0):
        wrong.append(f"it ended after {ended_s:.1f} s, {len(alive)} processes not at all")
    if status == 0 and how in (KILL, FREEZE) and "model" in said[-300:]:  # its work was done
        how = f"{how}, late"
    elif not is_named(kind, how, rank, status, said):
        wrong.append(f"{how} {rank}, status {status}, is not named: {said[-1500:]}")
    wrong += [f"{left} stayed" for left in left_of(names)]
    files = sorted(
        path.name for path in run.scratch.iterdir() if not path.name.startswith("torchelastic_")
    )  # torchrun's
    if how != LAUNCHER and files:
        wrong.append(f"{files} stayed in the folder of temporary files")
    return {"how": how, "rank": rank, "after_s": struck_s - run.begun_s, "ended_s": ended_s, "wrong": wrong}


def disturb(name: str, folder: Path, numbers: random.Random, strikes: int, within_s: float) -> dict[str, Any]:
    """That many strikes on runs of a kind, each of which ends at last."""
    kind, found, differ = KINDS[name], list[dict[str, Any]](), list[str]()
    undisturbed = folder / f"{name}, undisturbed"
    first = Run.start(kind, folder, undisturbed)
    status, said = first.end()
    took_s = time.monotonic() - first.begun_s
    if status:
        raise RuntimeError(f"{name}: the undisturbed run ended with status {status}: {said[-3000:]}")
    runs = 0
    while len(found) < strikes:
        out, runs = folder / f"{name}, {runs}", runs + 1
        for _ in range(min(STRIKES_OF_A_RUN, strikes - len(found))):
            if (struck := strike(kind, folder, out, numbers, took_s, within_s)) is None:
                break
            found.append(struck)
            print(f"{name}: {struck}", flush=True)
        status, said = Run.start(kind, folder, out).end()
        if status and not (kind.last and kind.last in said):  # torch's gloo may abort a program that has done all
            differ.append(f"run {runs}: status {status}: {said[-2000:]}")
        elif kind.resumes and steps(out) != steps(undisturbed):
            differ.append(f"run {runs}: it has the steps {steps(out)}")
        elif kind.resumes and (got := models(out, with_bits=kind.has_bits)) != (
            want := models(undisturbed, with_bits=kind.has_bits)
        ):
            differ.append(f"run {runs}: other models: {sorted(n for n in got | want if got.get(n) != want.get(n))}")
    for problem in differ:
        print(f"{name}: {problem}", flush=True)
    return {"kind": name, "undisturbed_s": took_s, "runs": runs, "strikes": found, "differ": differ}


def main() -> int:
    given = options_of(__doc__, strikes=300, seed=0, kinds=(*KINDS,), within_s=10.0)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    numbers, found = random.Random(given.seed), []
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        for number, name in enumerate(given.kinds):
            strikes = (given.strikes + number) // len(given.kinds)
            found.append(disturb(name, Path(scratch), numbers, strikes, given.within_s))
    rows = []
    for of in found:
        how = Counter(each["how"].partition(",")[0] for each in of["strikes"])
        longest_s = max((each.get("ended_s", 0.0) for each in of["strikes"] if FREEZE not in each["how"]), default=0.0)
        wrong = sum(bool(each["wrong"]) for each in of["strikes"])
        rows.append(
            [of["kind"], of["runs"], *(how[each] for each in HOW), f"{longest_s:.1f}", wrong, len(of["differ"])]
        )
    print(table(rows, ("kind", "runs", *HOW, "longest end, s", "ended wrong", "other at the end")))
    if given.out is not None:
        save_parts(given.out, kills={"seed": given.seed, "kinds": found, **about()})
    return int(any(row[-2] or row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
