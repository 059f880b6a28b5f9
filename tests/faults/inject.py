"""Ends, or stops, a rank of a real run at a chosen moment."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any
from unittest import mock

from odc_triton.jobs.checkpoints.background import BackgroundCheckpoints
from odc_triton.jobs.checkpoints.steps import Checkpoints
from odc_triton.jobs.train import loop, sft
from odc_triton.jobs.train.sft import train_sft
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.jobs.train.sft_run import SftRun
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.leftovers import is_stopped

# Events that the interpreter reports (PEP 578) while a checkpoint is written: each is a moment to die.
_FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.rmdir", "shutil.rmtree")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`signal` to `rank` in `phase` of minibatch `minibatch`, at the `moment`-th opportunity there.

    `phase`: step, save or background.
    """

    rank: int
    phase: str
    minibatch: int = 2
    moment: int = 0
    signal: int = signal.SIGKILL


def run_with(rank: int, world: int, wanted: SftOptions, fault: Fault | None, folder: str) -> str:
    """Runs `train_sft` on one rank, with temporary files in `folder`."""
    tempfile.tempdir = folder
    os.environ["TMPDIR"] = folder
    if fault is not None and fault.rank == rank:
        _arm(fault)
    with mock.patch("odc_triton.jobs.train.outcome.can_draw", return_value=False):
        train_sft(wanted)
    return "ended"


def struck(job: ranks.Job, fault: Fault, told: bool) -> tuple[ranks.Outcome, float]:
    """How the other of two ranks ended, and how many seconds after the fault. `told`: it gets SIGTERM then."""
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
    return outcome, time.monotonic() - start_s


class _Trigger:
    """Counts down to the moment."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.left, self.armed = fault, fault.moment, False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.left -= 1
            if self.left < 0:
                self.armed = False
                os.kill(os.getpid(), self.fault.signal)


def _arm(fault: Fault) -> None:
    trigger, in_background = _Trigger(fault), _Trigger(fault)  # the latter stays armed while steps are taken

    class FaultyRun(SftRun):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            if fault.phase == "step":
                self.optimizer.register_step_pre_hook(trigger)

        def train_step(self, **given: Any) -> dict:
            trigger.armed = fault.phase == "step" and self.state.step == fault.minibatch
            metrics = super().train_step(**given)
            trigger.armed = False
            return metrics

    class FaultyCheckpoints(Checkpoints):
        def save(self, **given: Any) -> Any:
            trigger.armed = fault.phase == "save" and given["step"] >= fault.minibatch
            path = super().save(**given)
            trigger.armed = False
            return path

    class FaultyBackground(BackgroundCheckpoints):
        def save(self, **given: Any) -> None:
            self.wait()  # the one before it is whole
            in_background.armed = fault.phase == "background" and given["step"] >= fault.minibatch
            super().save(**given)

    sft.SftRun = FaultyRun
    loop.Checkpoints, loop.BackgroundCheckpoints = FaultyCheckpoints, FaultyBackground
    if fault.phase != "step":
        sys.addaudithook(lambda event, _: (trigger(), in_background()) if event in _FILE_EVENTS else None)
