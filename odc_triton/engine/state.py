"""One rank's phase in the minibatch protocol, and its barrier with the other ranks.

    READY --begin()--> OPEN --end()--> REDUCED --optimizer step--> READY
      ^                  |                |
      |   (a microbatch raised: on all    |
      +---------- ranks) ----------+      +--begin(): without a step--> OPEN

READY    parameters readable, no gradients
OPEN     inside a minibatch: compute shards are only read, gradient shards only added to
REDUCED  every rank's gradients are in the owners' shards; `p.grad` is set
BROKEN   a barrier failed: a peer is gone or too late; this job can't go on
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch

from ..base.errors import DeadlineExceeded, PeerFailed, RankLost, describe
from ..base.events import EventLog
from ..comm.barrier import Barrier
from .transport import AllStreams, Transport


class Phase(IntEnum):
    READY = 0
    OPEN = 1
    REDUCED = 2
    BROKEN = 3


class RankState:
    """`number`: of the open or the last minibatch, -1 before the first. `failure`: why the open minibatch fails at its
    end, None if it does not. `events`: what this rank did.
    """

    def __init__(self, *, transport: Transport, barrier: Barrier) -> None:
        self.transport, self.heap, self.barrier = transport, transport.heap, barrier
        self.rank, self.world = barrier.rank, barrier.world
        self.streams = AllStreams(transport.streams, timeout_s=barrier.timeout_s)
        self.events = EventLog(self.rank)
        self.phase, self.number = Phase.READY, -1
        self.failure: str | None = None
        self._warned: set[str] = set()
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """True between entry and exit."""
        return self.phase is Phase.OPEN

    @property
    def is_broken(self) -> bool:
        return self.phase is Phase.BROKEN

    def fail(self, reason: str) -> None:
        """Marks the open minibatch as failed; it fails on every rank at the exit."""
        self.failure = self.failure or reason

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.barrier.show(minibatch=self.number, broken=self.is_broken)

    # ------------------------------------------------------------------ barriers

    def exchange(self, purpose: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """A training loop's own barrier, outside of minibatches; returns all ranks' messages, which are JSON.

        Raises RankLost, DeadlineExceeded.
        """
        self._refuse_broken()
        return self._exchange(purpose, message, None)

    def _exchange(self, purpose: str, message: dict[str, Any], error: BaseException | None) -> list[dict[str, Any]]:
        message |= {"error": None if error is None else describe(error), "follows": isinstance(error, PeerFailed)}
        try:
            with self.events.span("wait", label=purpose, microbatch=-1):
                return self.barrier.exchange(purpose, message)
        except BaseException:
            self._enter(Phase.BROKEN)
            raise

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Around what replicas do together: a rank that leaves it early shows it to the others."""
        try:
            yield
        except BaseException:
            self._enter(Phase.BROKEN)
            raise

    def drain(self, purpose: str) -> None:
        """Waits until this rank's device has done what was enqueued. Comes before its status says so."""
        try:
            self.streams.drain(purpose)
        except DeadlineExceeded as error:
            self.barrier.late(purpose, error)

    # ------------------------------------------------------------------ failures

    def _refuse_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError("an earlier barrier of this model's ranks failed; start again from the last checkpoint")

    def refuse_in_child(self, what: str) -> None:
        """Raises in a process forked from this rank's: it has the shared memory but is no rank."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{what} in process {os.getpid()}, forked from rank {self.rank} (process {self._pid}): it would write "
                f"into the memory that the ranks share. A forked process may run the model forward, nothing else"
            )

    def require_alive(self, ranks: Sequence[int], purpose: str) -> None:
        """Raises RankLost at once if one of these ranks' processes is gone; a few microseconds.

        `purpose`: what this rank needs them for.
        """
        try:
            self.barrier.require_alive(ranks, purpose, lambda: ranks)
        except RankLost:
            if not self.is_open:  # else the error ends the minibatch
                self._enter(Phase.BROKEN)
            raise

    def _break(self, purpose: str, error: BaseException) -> None:
        """A peer is lost or too late, or this rank must stop (Ctrl-C, exit): reports it without waiting."""
        self._enter(Phase.BROKEN)
        with contextlib.suppress(torch.distributed.DistError):  # the store may be what was lost
            self.barrier.post(purpose, {"error": describe(error), "follows": False})

    def abort(self, error: BaseException) -> None:
        """Tells peers that this rank's training loop ended by `error`, outside of a minibatch; does not wait."""
        if not self.is_broken:
            self._enter(Phase.BROKEN)
            with contextlib.suppress(torch.distributed.DistError):  # the store may be gone
                self.barrier.abort(describe(error))

    def require_peers(self, purpose: str) -> None:
        """Raises RankLost at once if a peer's process is gone. `purpose`: what this rank needs them for."""
        self.require_alive(range(self.world), purpose)

    def warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=4)
