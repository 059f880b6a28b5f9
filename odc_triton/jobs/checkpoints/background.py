"""Checkpoints that are written while training continues.

    at a step    each rank copies its values to the host, and a thread of it begins to write them
    at barriers  that training has anyway, ranks report their progress: once all have written, a thread of rank 0
                 makes one folder of it; once that is done, the checkpoint is whole on all ranks alike

A thread runs no collective and uses no GPU. A run that is killed leaves unfinished folders, which the next one removes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...base.errors import DeadlineExceeded
from ...checkpoint.failures import problem_of, raise_together
from ...checkpoint.folder import Saving
from ...engine.api import engine_of
from ...step import StepPart
from .steps import Checkpoints

_NAP_S = 0.05  # between the barriers of ranks that wait for a checkpoint
_QUIET_S = 5.0  # of such a wait, before it is reported
_END_S = 10.0  # that an ending run waits for a thread whose checkpoint is dropped
_REMEDY = "Older checkpoints are whole: free disk space, or repair the folder, and resume with --resume auto"


class Stage(Enum):
    WRITING = "writing"  # each rank its own files
    FINISHING = "finishing"  # rank 0 makes one folder of them


class _Work(threading.Thread):
    """One stage of this rank: what it returned, or the problem that it had. Starts at once."""

    def __init__(self, do: Callable[[Callable[[], bool]], Any]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._do, self._dropped = do, threading.Event()
        self.result: Any = None
        self.problem: list[str] | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._do(self._dropped.is_set)
        except BaseException as error:  # reported to all ranks at their next barrier
            self.problem = problem_of(error)

    def drop(self) -> None:
        """Ends the thread before its next write; waits for that, but not for ever: a disk may hang."""
        self._dropped.set()
        self.join(_END_S)


class BackgroundCheckpoints(StepPart):
    """Saves into `checkpoints` in the background, one checkpoint at a time. Every rank has one, for the run's time.

        background.save(optimizer=…, state=…, step=…)             # after a step
        reports = [… for each rank's message of a barrier]        # each has the rank's `background.report()`
        background.settle(reports)                                # after each such barrier, on every rank
        background.wait()                                         # before the end

    Host memory for all that this rank saves is allocated by the first save and used again by the others.
    """

    def __init__(self, checkpoints: Checkpoints, *, model: nn.Module) -> None:
        """Rank 0 makes `checkpoints` before any rank saves: a barrier lies between."""
        self.checkpoints, self._model, self._engine = checkpoints, model, engine_of(model)
        self._memory: dict[str, torch.Tensor] = {}
        self._stage: Stage | None = None  # None: nothing is being saved. The same on all ranks
        self._saving: Saving | None = None
        self._work: _Work | None = None  # this rank's in this stage; None where it has none
        self._problem: list[str] | None = None  # of this rank, before its thread began
        self._final, self._prunes = Path(), False

    @property
    def is_idle(self) -> bool:
        """True once all that was saved is whole. The same on all ranks."""
        return self._stage is None

    def save(self, *, optimizer: Optimizer, state: dict[str, Any], step: int, prune: bool = True) -> None:
        """Begins to save what `Checkpoints.save` does. Collective, but waits for other ranks and for the disk only if
        the last checkpoint is not whole yet.

        Call it between minibatches. A rank's problem is raised on all by `settle`. Raises as `wait` does.
        """
        if self._engine.is_open:
            raise RuntimeError("saving inside a minibatch: gradients are not reduced; save after the optimizer's step")
        self.wait(quiet_s=0.0)
        self._stage, self._final, self._prunes = Stage.WRITING, self.checkpoints.path_of(step), prune
        try:
            saving = Saving(self._final, model=self._model, optimizer=optimizer, state=state, step=step)
            saving.hold(self._memory)
        except Exception as error:
            self._problem = problem_of(error)
            return
        self._saving = saving
        self._work = _Work(self._write)

    def _write(self, is_dropped: Callable[[], bool]) -> dict[str, Any]:
        if self._engine.rank == 0:
            self.checkpoints.prepare()
        return self._saving.write(is_dropped)

    def _finish(self, written: list[dict[str, Any]]) -> None:
        self._saving.finish(written, number=self.checkpoints.next_number())
        if self._prunes:
            self.checkpoints.prune(self._final)

    def report(self) -> dict[str, Any] | None:
        """This rank's progress, as JSON; None if nothing is being saved."""
        if self._stage is None:
            return None
        work = self._work
        if work is None:
            return {"done": True, "problem": self._problem}
        if work.is_alive():
            return {"done": False}
        return {"done": True, "problem": work.problem, "written": work.result}

    def settle(self, reports: list[dict[str, Any] | None]) -> None:
        """Starts the next stage when all ranks' reports allow it; does not wait.

        Raises CheckpointFailed on all of them, naming the ranks that could not write; then nothing is left behind.
        """
        if self._stage is None:
            return
        problems = [each.get("problem") for each in reports]
        if any(problems):
            self._drop()
        raise_together(problems, f"save {self._final}", remedy=f". {_REMEDY}")
        if not all(each["done"] for each in reports):
            return
        self._work = None
        if self._stage is Stage.FINISHING:
            self._stage = self._saving = None
            return
        self._stage = Stage.FINISHING
        if self._engine.rank == 0:
            written = [each["written"] for each in reports]
            self._work = _Work(lambda _: self._finish(written))

    def wait(self, *, quiet_s: float = _QUIET_S) -> None:
        """Waits until what was saved is whole, and says so on rank 0 once it took `quiet_s`. Collective: barriers.

        Raises as `settle` does, and DeadlineExceeded on all ranks, naming those that have not done their part of a
        stage by the engine's deadline; RankLost.
        """
        start_s, is_told = time.monotonic(), False
        while self._stage is not None:
            if self._work is not None:
                self._work.join(_NAP_S)
            waited_s = time.monotonic() - start_s
            message = {"checkpoint": self.report(), "late": waited_s > self._engine.barrier.timeout_s}
            messages = self._engine.exchange(f"write {self._final.name}", message)
            reports, stage = [each["checkpoint"] for each in messages], self._stage
            self.settle(reports)
            if self._stage is not stage:
                start_s = time.monotonic()
                continue
            late = [rank for rank, each in enumerate(reports) if not each["done"]]
            if late and any(each["late"] for each in messages):
                self.close()  # what rank 0 still renames stays whole
                what = f"ranks {late} have not written their part of {self._final}"
                if stage is Stage.FINISHING:
                    what = f"rank 0 has not made {self._final} of what all ranks have written"
                raise DeadlineExceeded(late, f"{what} within {waited_s:.0f} s: the disk is slow or hangs. {_REMEDY}")
            if self._engine.rank == 0 and not is_told and waited_s >= quiet_s:
                is_told = True
                print(f"waiting for {self._final}, which is still being written", flush=True)

    def close(self) -> None:
        """Ends this rank's thread, after an error that the other ranks may not share. Waits for no rank.

        A checkpoint that all ranks have written is still finished by rank 0; one that they have not is dropped.
        """
        if self._stage is not Stage.FINISHING:
            self._drop()
        elif self._work is not None:
            self._work.join(_END_S)

    def _drop(self) -> None:
        """Removes what this rank has written of the checkpoint that is being saved."""
        if self._work is not None:
            self._work.drop()
            if self._work.is_alive():  # it still reads them
                self._memory = {}
        if self._saving is not None:
            self._saving.abandon()
        self._stage = self._saving = self._work = self._problem = None
