"""One of the ranks of an engine: its phase, as peers see it, and how it meets them, or gives up.

READY    parameters readable, no gradients
OPEN     inside a minibatch: compute shards are only read, gradient shards only added to
REDUCED  every rank's gradients are in the owners' shards; `p.grad` is set
BROKEN   a barrier failed: a peer is gone or too late; this job can't go on
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from traceback import walk_tb
from typing import Any

import torch.distributed as dist
from torch import nn

from ..base.errors import DeadlineExceeded, OdcError, OfRanks, PeerFailed, RankLost, describe
from ..base.events import EventLog
from ..comm.barrier import Barrier
from ..comm.grid import Grid
from ..comm.replicas import Replicas
from .shard import Shard
from .transport import AllStreams, Transport


class Phase(IntEnum):
    READY = 0
    OPEN = 1
    REDUCED = 2
    BROKEN = 3


def _is_of_communication(error: Exception) -> bool:
    """True if it was raised in torch.distributed: gloo's and NCCL's are RuntimeErrors like others'."""
    *_, module = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return isinstance(error, dist.DistError) or module.startswith(("torch.distributed", "torch._ops"))


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """A rank's ways to the others of an engine."""

    grid: Grid
    transport: Transport
    barrier: Barrier
    replicas: Replicas


class Member:
    """`shards`: the memory of all parameters, in the same order on all ranks. `number`: of the open or the last
    minibatch, -1 before the first. `events`: what this rank did.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.grid, self.replicas, self.transport = wiring.grid, wiring.replicas, wiring.transport
        self.heap, self.barrier = wiring.transport.heap, (barrier := wiring.barrier)
        self.rank, self.world = barrier.rank, barrier.world
        self.streams = AllStreams(wiring.transport.streams, timeout_s=barrier.timeout_s)
        self.events = EventLog(self.rank)
        self.phase, self.number = Phase.READY, -1
        self.base: Member | None = None  # of the frozen model that lends this one its parameters
        self.borrowers: weakref.WeakSet[Member] = weakref.WeakSet()
        self.shards: list[Shard] = []
        self.reads_only = False  # nothing that is sharded trains
        self._warned: set[str] = set()
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """True between entry and exit."""
        return self.phase is Phase.OPEN

    @property
    def is_broken(self) -> bool:
        return self.phase is Phase.BROKEN

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.barrier.show(minibatch=self.number, broken=self.is_broken)

    def trainable(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.trains]

    def originals(self) -> Iterable[tuple[nn.Parameter, Any]]:
        """(parameter as it was before sharding, as it is now), where something still holds the first."""
        return ()

    def exchange(self, purpose: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """A training loop's own barrier, outside of minibatches; returns all ranks' messages, which are JSON.

        Raises RankLost, DeadlineExceeded.
        """
        self.refuse_in_child(f"'{purpose}'")
        self.refuse_broken()
        return self.meet(purpose, message, None)

    def meet(self, purpose: str, message: dict[str, Any], error: BaseException | None) -> list[dict[str, Any]]:
        message |= {"error": None if error is None else describe(error), "follows": isinstance(error, PeerFailed)}
        try:
            with self.events.span("wait", label=purpose, microbatch=-1):
                return self.barrier.exchange(purpose, message)
        except BaseException:
            self.enter(Phase.BROKEN)
            raise

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around what replicas do together: a rank that leaves it early shows it to the others."""
        try:
            yield
        except BaseException:
            self.enter(Phase.BROKEN)
            raise

    def drain(self, purpose: str) -> None:
        """Waits until this rank's device has done what was enqueued. Comes before its status says so."""
        try:
            self.streams.drain(purpose)
        except DeadlineExceeded as error:
            self.barrier.raise_late(purpose, error)

    def refuse_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError("an earlier barrier of this model's ranks failed; start again from the last checkpoint")

    def refuse_in_child(self, what: str) -> None:
        """Raises in a process forked from this rank's: it has the shared memory but is no rank."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{what} in process {os.getpid()}, forked from rank {self.rank} (process {self._pid}): it would write "
                f"into the memory that the ranks share. A forked process may run the model forward, nothing else"
            )

    def borrow_from(self, base: Member) -> None:
        """From now on the loss of any rank of `base` is one of this engine's."""
        self.base = base
        base.borrowers.add(self)

    def refuse_borrowed(self, call: str, instead: str) -> None:
        """Raises RuntimeError if this model has a base: `call` is not for one that others read."""
        if self.base is not None:
            raise RuntimeError(
                f"{call} of a model whose frozen parameters are in a base that other runs read: {instead}"
            )

    def require_alive(self, ranks: Sequence[int], purpose: str) -> None:
        """Raises RankLost at once if one of these ranks' processes is gone, or one of a base's; a few microseconds.

        `purpose`: what this rank needs them for.
        """
        if self.base is not None:
            self.base.require_peers(purpose)
        try:
            self.barrier.require_alive(ranks, purpose, lambda: ranks)
        except RankLost:
            if not self.is_open:  # else the error ends the minibatch
                self.enter(Phase.BROKEN)
            raise

    @contextlib.contextmanager
    def naming_lost(self, what: str) -> Iterator[None]:
        """Around code that communicates in ways of its own: if its error comes from a peer whose process is gone,
        RankLost with that peer's name is raised instead. `what`: the code, in messages.
        """
        try:
            yield
        except OdcError:
            raise
        except Exception as error:
            if _is_of_communication(error):
                try:
                    self.barrier.name_lost(what, error)
                except OfRanks:
                    self.enter(Phase.BROKEN)
                    raise
            raise

    def give_up(self, purpose: str, error: BaseException) -> None:
        """A peer is lost or too late, or this rank must stop (Ctrl-C, exit): reports it without waiting."""
        self.enter(Phase.BROKEN)
        with contextlib.suppress(dist.DistError):  # the store may be what was lost
            self.barrier.post(purpose, {"error": describe(error), "follows": False})

    def abort(self, error: BaseException) -> None:
        """Tells peers that this rank's training loop ended by `error`, outside of a minibatch; does not wait."""
        if not self.is_broken:
            self.enter(Phase.BROKEN)
            with contextlib.suppress(dist.DistError):  # the store may be gone
                self.barrier.abort(describe(error))

    def require_peers(self, purpose: str) -> None:
        """Raises RankLost at once if a peer's process is gone. `purpose`: what this rank needs them for."""
        self.require_alive(range(self.world), purpose)

    def mute(self, key: str) -> None:
        """`warn_once` of this key says nothing."""
        self._warned.add(key)

    def warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=4)
