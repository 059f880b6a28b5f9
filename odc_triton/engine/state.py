"""Where a rank is in the minibatch protocol: each part of the engine asks this before it does anything.

    READY --begin()--> OPEN --end()--> LANDED --optimizer step--> READY
      ^                  |                |
      |   (a microbatch raised: on all    |
      +---------- ranks) ----------+      +--begin(): without a step--> OPEN

READY   parameters readable, no gradients
OPEN    inside a minibatch: shards are only read, gradient shards only added to
LANDED  every rank's gradients are in the owners' shards; `p.grad` is set
BROKEN  a barrier failed: a peer is gone or too late; this job can't go on
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from ..base.errors import RankLost
from ..base.events import EventLog
from ..comm.barrier import Barrier
from .publication import Publication


class Phase(IntEnum):
    READY = 0
    OPEN = 1
    LANDED = 2
    BROKEN = 3


class NoSplits:
    """What computes pieces of sequences with other ranks: nothing, until `enable_split` sets a `SequenceExchange`."""

    tokens = 0
    """Of each rank, the most tokens that others may read."""

    def check(self, plan: Any) -> None:
        """Before ranks meet at the entry. Raises what says why this rank can't compute its pieces of `plan`, if any."""
        if plan is not None:
            raise RuntimeError("this minibatch splits sequences: call enable_split(model, tokens=…) after fully_shard")

    def begin(self, plan: Any, *, forward_only: bool = False) -> None:
        """The minibatch is open; `forward_only`: there is none, only an evaluation."""

    def incomplete(self) -> str | None:
        """What this rank has not computed of the plan."""

    def fail(self) -> None:
        """Ends the waits of ranks that need this rank's pieces."""

    def end(self, *, failed: bool) -> None:
        """The ranks have met at the exit; `failed`: some rank's minibatch did."""


class MinibatchState:
    """One rank's phase, its minibatch's number, failure and events, and what may be read.

    `number`: of the open or the last minibatch, -1 before the first.
    """

    def __init__(self, *, rank: int, barrier: Barrier, publication: Publication) -> None:
        self.rank, self._barrier = rank, barrier
        self.publication = publication
        self.events = EventLog(rank)
        self.phase = Phase.READY
        self.number = -1
        self.failure: str | None = None
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.OPEN

    @property
    def is_broken(self) -> bool:
        return self.phase is Phase.BROKEN

    def enter(self, phase: Phase) -> None:
        """Goes to `phase` and shows peers what they need to know of it."""
        self.phase = phase
        self._barrier.show(minibatch=self.number, broken=self.is_broken)

    def fail(self, reason: str) -> None:
        """Marks the open minibatch as failed; every rank hears of it at the exit."""
        self.failure = self.failure or reason

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
            self._barrier.require_alive(ranks, purpose, lambda: ranks)
        except RankLost:
            if not self.is_open:  # else the error ends the minibatch
                self.enter(Phase.BROKEN)
            raise
