"""One trial: a run with a fault, what it must leave, and the resumed run, which must end as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

from odc_triton.checkpoint.steps import verify
from odc_triton.train.metrics import read_metrics
from odc_triton.train.sft_options import SftOptions
from tests.faults.inject import Fault, run_with
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.leftovers import is_stopped

WITHIN_S = LONG_S / 2  # after the death, or after the deadline
DEADLINE_S = 8.0  # for trials in which a rank is stopped; a busy machine could exceed a shorter one
# Gradients are added in the order of their arrival.
RELATIVE = 1e-5


def run_trial(wanted: SftOptions, fault: Fault, *, told: bool, folder: Path, losses: list[float]) -> int:
    """Runs it on two ranks; the step from which the next run goes on.

    `told`: the survivor gets SIGTERM, as torchrun sends it; `losses`: those of the run without a fault.
    """
    folder.mkdir(parents=True)
    scratch = folder / "tmp"
    scratch.mkdir()
    stops = fault.signal == signal.SIGSTOP
    out = folder / "out"
    wanted = replace(wanted, out=str(out), resume="auto", timeout_minutes=(DEADLINE_S if stops else LONG_S) / 60)
    if fault.phase == "load":
        ranks.run(run_with, 2, replace(wanted, timeout_minutes=LONG_S / 60, keep=9), None, str(scratch))
        for path in (out / "checkpoints").glob("step-*"):
            if path.name != "step-00000002":
                shutil.rmtree(path)
    with ranks.start(run_with, 2, wanted, fault, str(scratch)) as job:
        ended_s, error = _watch(job, fault, told)
        pids = [process.pid for process in job.processes]
    if error is not None:
        assert f"rank {fault.rank}" in error, f"the error does not name rank {fault.rank}: {error}"
        assert ("DeadlineExceeded" if stops else "RankLost") in error, error
    assert ended_s < WITHIN_S + (DEADLINE_S if stops else 0), f"the other took {ended_s:.1f} s to end"
    _nothing_stays(pids, scratch)
    resumed_at = _checkpoints_are_whole(out)
    ends = ranks.run(run_with, 2, replace(wanted, timeout_minutes=LONG_S / 60), None, str(scratch))
    assert ends == ["ended"] * 2
    _is_as_if_nothing_had_been(out, losses)
    _nothing_stays([], scratch)
    return resumed_at


def _watch(job: ranks.Job, fault: Fault, told: bool) -> tuple[float, str | None]:
    """(how long the other rank took from the fault on, the last line of its error)."""
    victim, other = job.processes[fault.rank], 1 - fault.rank
    deadline_s = time.monotonic() + LONG_S
    while victim.is_alive() and not is_stopped(victim.pid):
        wait([victim.sentinel], timeout=0.02)
        assert time.monotonic() < deadline_s, "the run neither ended nor met its fault"
    start_s = time.monotonic()
    assert victim.is_alive() or victim.exitcode == -signal.SIGKILL, "the run ended before its fault"
    if told:
        os.kill(job.processes[other].pid, signal.SIGTERM)
    (outcome,) = job.wait_for([other])
    ended_s = time.monotonic() - start_s
    # One that was told to stop when its training had already ended by the loss dies of the signal.
    if told and outcome.signal == signal.SIGTERM:
        return ended_s, None
    assert outcome.error is not None, f"the survivor ended without an error: {outcome}"
    return ended_s, outcome.error.strip().splitlines()[-1]


def _nothing_stays(pids: list[int], scratch: Path) -> None:
    assert list(scratch.iterdir()) == [], "temporary files stay"
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), f"process {pid} stays"
        left = [name for name in os.listdir("/dev/shm") if str(pid) in name]
        assert not left, f"shared memory stays: {left}"


def _checkpoints_are_whole(out: Path) -> int:
    """Verifies all finished ones; returns the newest one's step, or 0 if there is none."""
    found = sorted((out / "checkpoints").glob("step-*"))
    for path in found:
        verify(path)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _is_as_if_nothing_had_been(out: Path, losses: list[float]) -> None:
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(losses) + 1))
    for line, want in zip(lines, losses, strict=True):
        assert abs(line["loss"] - want) <= RELATIVE * want, f"step {line['step']}: {line['loss']}, not {want}"
    assert (out / "model" / "model.safetensors").exists()
    rests = [path.name for path in [*out.iterdir(), *(out / "checkpoints").iterdir()] if path.name.startswith(".")]
    assert set(rests) <= {".lock"}, f"unfinished files stay: {rests}"
