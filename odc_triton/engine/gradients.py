"""How a rank's gradient gets into its owners' shards: under locks on the CPU, by atomic additions on a GPU."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch.profiler import record_function

from odc_kernels.peers import PeerShards

from ..base.errors import DeadlineExceeded
from ..comm.memory.shm import SharedMemoryHeap
from ..nn.operand import AddRows, add_rows
from .exact import ExactSum
from .streams import Streams

_NAP_S = 20e-6
_LONG_WAIT_S = 1e-3  # shorter waits for a lock are not worth an event

Waits = list[tuple[float, float]]


class Target:
    """Where one parameter's gradient goes. `slot`: its number in the plan; `shards`: rows per owner, in their order.

    A scalar's one owner is rank 0: give its shard as one row. `near`: as in `PeerShards`. `exact`: adds to shards
    of integers.
    """

    def __init__(
        self,
        *,
        slot: int,
        shards: Sequence[torch.Tensor],
        rank: int,
        near: frozenset[int] | None = None,
        exact: ExactSum | None = None,
    ) -> None:
        self.slot, self.shards, self._rank, self._near, self.exact = slot, tuple(shards), rank, near, exact

    def add_rows(self, owner: int, at: int | torch.Tensor, rows: torch.Tensor) -> None:
        """Adds to an owner's shard, on the host. Nobody else may add to it meanwhile."""
        add = add_rows if self.exact is None else self.exact.add
        add(self.shards[owner], at, rows)

    def begin_addition(self) -> None:
        """To each element at most once, except by index on the host. Each kernel adds to an element once."""
        if self.exact is not None:
            self.exact.additions += 1

    @property
    def peers(self) -> PeerShards:
        """As kernels see it in this minibatch. Raises ValueError if the shards are not aligned, as in the CPU's joined
        heap.
        """
        return self._peers if self.exact is None else replace(self._peers, exact=self.exact.adds())

    @cached_property
    def _peers(self) -> PeerShards:
        shape = (sum(len(shard) for shard in self.shards), *self.shards[0].shape[1:])
        rank = self._rank if len(self.shards) > 1 else 0
        near = {self._rank} if self._near is None else self._near
        return PeerShards.of(self.shards, shape=shape, rank=rank, near=near & set(range(len(self.shards))))


class Accumulator(ABC):
    """Adds whole gradients into their owners' shards while other ranks do the same."""

    @abstractmethod
    def add(self, gradient: torch.Tensor, target: Target, *, name: str, waited: Callable[[Waits], None]) -> None:
        """Adds `gradient`, whose rows are those of all shards together. `name`: the parameter's, for errors.

        `waited` gets the times, as (start_s, end_s), during which other ranks held it up.
        """

    @abstractmethod
    def sink(self, target: Target, *, name: str, waited: Callable[[Waits], None]) -> PeerShards | AddRows:
        """How an operator that makes a gradient piece by piece adds it: shards for a kernel, or a function."""


class LockedAccumulator(Accumulator):
    """One lock per (parameter, owner). A lock that is taken is tried again later, so that ranks that arrive together
    work on different owners. Raises DeadlineExceeded with the holder's name.
    """

    def __init__(self, heap: SharedMemoryHeap, streams: Streams, timeout_s: float) -> None:
        self._heap, self._streams, self._timeout_s = heap, streams, timeout_s
        self._threads: dict[int, threading.Lock] = {}  # per slot; see [Note: traps of fcntl locks]

    def add(self, gradient: torch.Tensor, target: Target, *, name: str, waited: Callable[[Waits], None]) -> None:
        self._streams.add(gradient, lambda gradient: waited(self._add(gradient, target, name)))

    @torch.no_grad()
    def _add(self, gradient: torch.Tensor, target: Target, name: str) -> Waits:
        waits: Waits = []
        target.begin_addition()
        rows = gradient.split([len(shard) for shard in target.shards])
        world = len(target.shards)
        with record_function("odc.accumulate"), self._threads.setdefault(target.slot, threading.Lock()):
            pending = [(self._heap.rank + step) % world for step in range(world)]
            pending = [owner for owner in pending if target.shards[owner].numel()]
            stuck_s: float | None = None
            while pending:
                before_s = time.monotonic()
                left = [owner for owner in pending if not self._try_add(rows[owner], target, owner)]
                if len(left) < len(pending):
                    if stuck_s is not None and before_s - stuck_s > _LONG_WAIT_S:
                        waits.append((stuck_s, before_s))
                    stuck_s = None
                else:
                    stuck_s = before_s if stuck_s is None else stuck_s
                    self._give_up_if_late(before_s - stuck_s, target.slot, left[0], name)
                    time.sleep(_NAP_S)
                pending = left
        return waits

    def sink(self, target: Target, *, name: str, waited: Callable[[Waits], None]) -> AddRows:
        target.begin_addition()

        @torch.no_grad()
        def add_under_lock(owner: int, at: int | torch.Tensor, rows: torch.Tensor) -> None:
            begin_s = stuck_until_s = time.monotonic()
            with record_function("odc.accumulate"), self._threads.setdefault(target.slot, threading.Lock()):
                while not self._try_add(rows, target, owner, at):
                    self._give_up_if_late(time.monotonic() - begin_s, target.slot, owner, name)
                    time.sleep(_NAP_S)
                    stuck_until_s = time.monotonic()
            if stuck_until_s - begin_s > _LONG_WAIT_S:
                waited([(begin_s, stuck_until_s)])

        return add_under_lock

    def _try_add(self, rows: torch.Tensor, target: Target, owner: int, at: int | torch.Tensor = 0) -> bool:
        if not self._heap.try_lock(target.slot, owner):
            return False
        try:
            target.add_rows(owner, at, rows)
        finally:
            self._heap.unlock(target.slot, owner)
        return True

    def _give_up_if_late(self, waited_s: float, slot: int, owner: int, name: str) -> None:
        if waited_s > self._timeout_s:
            holder, first = self._heap.lock_holder(slot, owner), self._heap.first
            ranks = [] if holder is None else [first + holder]
            raise DeadlineExceeded(
                ranks,
                f"rank {first + self._heap.rank} waited {waited_s:.1f} s to add its gradient of {name} to the shard of "
                f"rank {first + owner}: its lock is held by {f'rank {ranks[0]}' if ranks else 'another process'}",
            )


class KernelAccumulator(Accumulator):
    """The scatter kernel, on its own stream: additions are atomic, ranks never wait for each other."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def add(self, gradient: torch.Tensor, target: Target, *, name: str, waited: Callable[[Waits], None]) -> None:
        from odc_kernels.scatter import scatter  # here, as importing triton takes a second

        target.begin_addition()
        peers = target.peers
        self._streams.add(gradient.contiguous(), lambda gradient: scatter(gradient=gradient, peers=peers))

    def sink(self, target: Target, *, name: str, waited: Callable[[Waits], None]) -> PeerShards:
        self._streams.computes_here()  # the kernel that adds is launched on this stream
        target.begin_addition()
        return target.peers
