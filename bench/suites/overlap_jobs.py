"""Commands for overlap_faults.py: GRPO on a small model whose ranks compute while others sample, and its faults."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from odc_triton.balance import relatives
from odc_triton.balance.counter import Log
from odc_triton.base.config_file import write_config
from odc_triton.base.errors import GenerationFailed
from odc_triton.cli import main as odc_triton
from odc_triton.comm.launch import die_with_parent
from odc_triton.rl.overlap import OverlappedRollout
from odc_triton.rl.transformers_engine import TransformersEngine
from odc_triton.train import grpo, outcome
from odc_triton.train.grpo_options import GrpoOptions
from odc_triton.train.grpo_run import GrpoRun
from odc_triton.train.metrics import Metrics
from tests.support.grpo_case import Recorded, case
from tests.support.leftovers import names
from tests.support.sft_case import VOCABULARY

KILLS = ("kill", "kill of rank 0", "kill in a message")  # in a message: its place in the log stays empty
STOPS = ("stop of a rank", "stop of the command")
KINDS = (*KILLS, *STOPS, "reward raises", "reward is late", "engine fails")
SAMPLING = ("transformers", "recorded", "remote")
STEPS, PROMPTS = 4, 12
LONG_S, STAYS_S = 120.0, 60.0
REWARD = "tests.rewards:disturbed"
_SLEEP_S = 0.1  # at most, before completions come


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A job's kind."""

    ranks: int
    sampling: str
    exact: bool
    split: bool

    def options(self, folder: Path, out: Path) -> GrpoOptions:
        how: dict[str, Any] = {"exact": self.exact, "decode_at_once": 64 if self.sampling == "remote" else 3}
        if self.sampling == "remote":
            how |= {"engine": "vllm-server", "vllm_server": "http://127.0.0.1:1", "importance": "token_truncate"}
        if self.split:
            how |= {"split_sequences": True, "token_cap": 240, "split_tokens": 120}
            how |= {"max_new_tokens": 150, "generations": 2}
        how |= {"model": str(folder / "start"), "init": None, "optimizer": "sgd", "lr": 1.0, "reward": (REWARD,)}
        how |= {"steps": STEPS, "prompts_per_rank": 2, "checkpoint_every": 1, "overlap_rollout": "on"}
        return case(folder, out=str(out), resume="auto", **how)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Of rank `victim` in a step, at `moment`, from 0 to 1. A reward's is at the prompt of that number instead."""

    kind: str
    cell: Cell
    victim: int
    step: int
    moment: float
    prompt: int

    @classmethod
    def at_random(cls, numbers: random.Random, kind: str, cell: Cell) -> Fault:
        return cls(
            kind=kind,
            cell=cell,
            victim=0 if kind == "kill of rank 0" else numbers.randrange(cell.ranks),
            step=numbers.randrange(STEPS - 1),
            moment=numbers.random(),
            prompt=numbers.randrange(PROMPTS),
        )

    @property
    def end(self) -> tuple[int, list[str]]:
        """The command's status, and words of its error."""
        if self.kind in STOPS:
            return 128 + signal.SIGTERM, ["odc-triton: stopped by SIGTERM"]
        if self.kind in KILLS:
            return 1, [f"odc-triton: rank {self.victim} failed first: its process was killed by SIGKILL"]
        named = {
            "reward raises": f"reward {REWARD} raised KeyError: 'told to'",
            "reward is late": f"reward {REWARD} did not return within its timeout of 1 s",
            "engine fails": f"rank {self.victim}: the engine broke",
        }
        return 1, ["odc-triton: a rollout failed (rank ", named[self.kind]]


# ------------------------------------------------------------------ inside the command


class _Engine:
    """`inner`, after random sleeps. `fails`: the next call does."""

    def __init__(self, inner: Any, fails: Callable[[], bool]) -> None:
        self.samples_elsewhere, self.samples_remotely = inner.samples_elsewhere, inner.samples_remotely
        self._inner, self._fails, self._aborted = inner, fails, threading.Event()
        self.sync, self.close, self.abort = inner.sync, inner.close, self._aborted.set

    def generate(self, *given: Any) -> Any:
        if self._fails():
            raise GenerationFailed("the engine broke")
        if self._aborted.wait(random.random() * _SLEEP_S):
            raise GenerationFailed("the request was aborted")
        return self._inner.generate(*given)


class _Trap:
    """Strikes in the victim's process, which is forked from this one. `step_s`: about the seconds of a step."""

    def __init__(self, struck: Path, fault: Fault | None, step_s: float) -> None:
        self._struck, self._fault, self._step_s = struck, fault, step_s
        self._is_set, self._seen = False, itertools.count()
        self._train_step, self._write = GrpoRun.train_step, Log.write

    def _note(self) -> None:
        self._struck.write_text(f"{time.time()}\n")

    def _strike(self) -> None:
        self._note()
        target = os.getppid() if self._fault.kind == "stop of the command" else os.getpid()
        os.kill(target, signal.SIGKILL if self._fault.kind in KILLS else signal.SIGTERM)

    def on_step(self, run: GrpoRun) -> Metrics | None:
        fault = self._fault
        if fault is not None and (run.engine.rank, run.state.step) == (fault.victim, fault.step):
            self._is_set = True
            if fault.kind in ("kill", "kill of rank 0", *STOPS):
                threading.Timer(fault.moment * self._step_s, self._strike).start()
        return self._train_step(run)

    def on_write(self, log: Log, message: dict[str, Any]) -> None:
        if self._is_at("kill in a message", 5):
            log._store.add(log._key, 1)
            self._strike()
        self._write(log, message)

    def fails(self) -> bool:
        due = self._is_at("engine fails", 2)
        if due:
            self._note()
        return due

    def _is_at(self, kind: str, calls: int) -> bool:
        """One of the next calls."""
        return self._is_set and self._fault.kind == kind and next(self._seen) == int(self._fault.moment * calls)


def _command(folder: Path, cell: Cell, fault: Fault | None, step_s: float, environment: dict[str, str]) -> None:
    """`odc-triton train grpo`, in a session and with temporary files of its own."""
    die_with_parent()
    os.setsid()
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    trap, rest = _Trap(folder / "struck", fault, step_s), OverlappedRollout._rest

    def noted_rest(own: OverlappedRollout) -> Any:
        packs = rest(own)
        if own.plan is not None and own.engine.rank == 0:
            (folder / f"cut-{own.engine.number}").touch()
        return packs

    def engine(wanted: GrpoOptions, model: Any, should_stop: Callable[[], bool]) -> _Engine:
        remote = cell.sampling == "remote"
        recorded = Recorded(VOCABULARY, elsewhere=remote, remotely=remote)
        is_real = cell.sampling == "transformers"
        return _Engine(TransformersEngine(model, should_stop=should_stop) if is_real else recorded, trap.fails)

    GrpoRun.train_step = lambda run: trap.on_step(run)
    Log.write = lambda log, message: trap.on_write(log, message)
    OverlappedRollout._rest = noted_rest
    grpo._engine, grpo.PolicyServer = engine, lambda address: SimpleNamespace(check=lambda **_: None)
    relatives.LEAST_SHARED = 4  # prompts here are short
    outcome.can_draw = lambda: False
    status = odc_triton(["train", "grpo", "--ranks", str(cell.ranks), "--config", str(folder / "run.yaml")])
    sys.stdout.flush()
    os._exit(status)


# ------------------------------------------------------------------ around it


@dataclass(frozen=True, kw_only=True)
class Ended:
    """`struck_s`, `end_s`: times; the first is None if there was no fault. `cut`: steps with samples in pieces."""

    status: int | None
    struck_s: float | None
    end_s: float
    text: str
    problems: str
    stayed: list[str]
    cut: int


def _processes(session: int, mark: str) -> list[str]:
    """Of the session, and those that were started with the mark: rewards have sessions of their own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX" and (int(own) == session or mark.encode() in (path / "environ").read_bytes()):
                found.append(f"process {path.name}")
        except OSError:  # it has ended
            continue
    return found


def _shared() -> set[str]:
    return {name for name in names() if not name.startswith("@")}


def _what_stays(before: set[str], session: int, mark: str) -> list[str]:
    """Sockets here have no files: they end with their processes. Other jobs on this machine share memory too, but not
    for long.
    """
    deadline_s, new = time.monotonic() + STAYS_S, _shared() - before
    while (found := [*_processes(session, mark), *(new & _shared())]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return found


def run(data: Path, folder: Path, cell: Cell, fault: Fault | None = None, step_s: float = 0.0) -> Ended:
    """Runs the command until its end; what it writes is in `folder`/out. `data`: of `write_prompts`."""
    options, mark = cell.options(data, folder / "out"), f"odc-job-{uuid.uuid4().hex}"
    environment = {"ODC_BENCH_JOB": mark, "TMPDIR": str(folder / "tmp"), "ODC_TEST_STRUCK": str(folder / "struck")}
    if fault is not None and fault.kind.startswith("reward"):
        prompt = json.loads((data / "prompts.jsonl").read_text().splitlines()[fault.prompt])["prompt"]
        environment["ODC_TEST_REWARD"] = f"{fault.kind.removeprefix('reward ')}: {prompt}"
        options = replace(options, reward_timeout_s=1.0 if fault.kind == "reward is late" else LONG_S)
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    write_config(folder / "run.yaml", options, comment="the run")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2", __name__])
    before = _shared()
    process = context.Process(target=_command, args=(folder, cell, fault, step_s, environment))
    process.start()
    process.join(LONG_S)
    end_s, status = time.time(), process.exitcode
    if status is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    struck = folder / "struck"
    return Ended(
        status=status,
        struck_s=float(struck.read_text().split()[0]) if struck.exists() else None,
        end_s=end_s,
        text=(folder / "stdout").read_text(),
        problems=(folder / "stderr").read_text(),
        stayed=[*_what_stays(before, process.pid, mark), *(each.name for each in (folder / "tmp").iterdir())],
        cut=len([*folder.glob("cut-*")]),
    )
