"""A rank's way to its peers: the order of what its device computes, copies and adds; and how gradients are added.

Under locks on the CPU, by atomic additions on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from odc_kernels.peers import PeerShards
from odc_kernels.streams import Device

from ..base.errors import DeadlineExceeded
from ..comm.memory.heap import SharedMemoryHeap, SymmetricHeap
from ..nn.operand import AddRows, add_rows

# A stream reads one owner at a time, and ranks are not in step, so which one is as good as random. Of the links of 8
# owners, 8 ranks with one stream each keep 1 - (7/8)^8 = 0.66 busy, with two 0.90, with three 0.98. A third would cost
# the host one more call per unit.
COPY_STREAMS = 2
_POLL_S = 50e-6
_IN_FLIGHT_BYTES = 512 * 2**20
_NAP_S = 20e-6
_LONG_WAIT_S = 1e-3  # shorter waits for a lock are not worth an event

Waits = list[tuple[float, float]]


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of that name for torch.profiler. Without one it costs nothing; torch's takes longer than a copy."""
    return record_function(name) if torch.autograd.profiler._is_profiler_enabled else contextlib.nullcontext()


class Copies:
    """Some copies from peers, to wait for."""


class Streams:
    """The CPU's: everything is done when a call returns, so there is nothing to order or to wait for.

    `device`: whose streams they are; None for a CPU's.
    """

    device: Device | None = None

    def compute(self, work: Callable[[], None]) -> None:
        """Runs `work` after all computation enqueued before."""
        work()

    def computes_here(self) -> None:
        """Notes that the caller enqueues its own work on the current stream."""

    def allocate(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Gives a freed storage memory again."""
        storage.resize_(size_bytes)

    def copy(self, storage: torch.UntypedStorage, *works: Callable[[], None]) -> Copies:
        """Copies from peers into `storage`, by `works` in no order, after all computation enqueued before."""
        for work in works:
            work()
        return Copies()

    def wait(self, copies: Copies) -> None:
        """Makes the computation from here on follow the copies."""

    def free(self, storage: torch.UntypedStorage, copies: Copies) -> None:
        """Frees memory: anything that reuses it follows the copies into it and what read them."""
        storage.resize_(0)

    def add(
        self, gradient: torch.Tensor, work: Callable[[torch.Tensor], object], *, most_bytes: int | None = None
    ) -> None:
        """Adds `gradient` to peers, by `work`, after all computation enqueued before. `most_bytes`: that may wait."""
        work(gradient)

    def follow_adds(self) -> None:
        """Makes the computation from here on follow all additions enqueued before."""

    def after_adds(self, work: Callable[[], None]) -> None:
        """Runs `work` after all additions enqueued before."""
        work()

    def go_on(self) -> None:
        """Call before a wait for peers, who may wait for this rank's additions: a simulated device makes them now."""

    def drain(self, timeout_s: float, purpose: str) -> None:
        """Waits until the device has done all that was enqueued. Raises DeadlineExceeded."""

    def another(self) -> Streams:
        """More streams of the same device."""
        return Streams()


@dataclass(slots=True)
class _DeviceCopies(Copies):
    """`home`: the stream that was current when they began, on which their memory was allocated. `done`: events after
    all copies. `users`: the streams that wait for them already.
    """

    home: Any
    done: list[Any]
    users: list[Any]


class DeviceStreams(Streams):
    """A device's: copies from peers and additions to peers have their own streams, not the current one.

    [Note: memory of side streams] The caching allocator knows one stream per block, the one that was current when
    the block was allocated. So every block that side streams work on is allocated on the current stream, and freed
    only when that stream follows the work of all of them: whole parameters by `free`; gradients when their addition is
    seen to be done or, when more than `in_flight_bytes` are held, once the current stream waits for the oldest.
    `Tensor.record_stream` would work too, but would block reuse for as long as the host runs ahead.

    The caller chooses the current stream and may change it within a minibatch: `drain` waits for all that were current.
    """

    def __init__(self, device: Device, *, in_flight_bytes: int = _IN_FLIGHT_BYTES) -> None:
        self.device = self._device = device
        self._copy, self._add = [device.stream() for _ in range(COPY_STREAMS)], device.stream()
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        self._in_flight_bytes, self._most_bytes = 0, in_flight_bytes
        self._computing: dict[Any, None] = {}  # what was current since the last drain, in that order

    def _current(self) -> Any:
        stream = self._device.current()
        self._computing[stream] = None
        return stream

    def compute(self, work: Callable[[], None]) -> None:
        self._device.enqueue(self._current(), work)

    def computes_here(self) -> None:
        self._current()

    def allocate(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        self._device.allocate(storage, size_bytes)

    def copy(self, storage: torch.UntypedStorage, *works: Callable[[], None]) -> _DeviceCopies:
        copies = _DeviceCopies(home=self._current(), done=[], users=[])
        for work, stream in zip(works, itertools.cycle(self._copy), strict=False):
            stream.wait_stream(copies.home)
            self._device.enqueue(stream, work, storage)
            copies.done.append(stream.record_event())
        return copies

    def wait(self, copies: _DeviceCopies) -> None:
        if (current := self._current()) not in copies.users:
            for done in copies.done:
                current.wait_event(done)
            copies.users.append(current)

    def free(self, storage: torch.UntypedStorage, copies: _DeviceCopies) -> None:
        for done in copies.done:
            copies.home.wait_event(done)
        for user in copies.users:
            if user != copies.home:
                copies.home.wait_stream(user)
        self._device.free(storage)

    def add(
        self, gradient: torch.Tensor, work: Callable[[torch.Tensor], object], *, most_bytes: int | None = None
    ) -> None:
        self._add.wait_stream(self._current())
        self._device.enqueue(self._add, work, gradient)
        self._in_flight.append((self._add.record_event(), gradient))
        self._in_flight_bytes += gradient.nbytes
        while self._in_flight and self._in_flight[0][0].query():
            self._let_go()
        while self._in_flight_bytes > (self._most_bytes if most_bytes is None else most_bytes):
            self._current().wait_event(self._in_flight[0][0])
            self._let_go()

    def follow_adds(self) -> None:
        self._current().wait_stream(self._add)

    def after_adds(self, work: Callable[[], None]) -> None:
        self._device.enqueue(self._add, work)

    def go_on(self) -> None:
        self._device.has_come(self._add.record_event())

    def another(self) -> DeviceStreams:
        return DeviceStreams(self._device, in_flight_bytes=self._most_bytes)

    def _let_go(self) -> None:
        _, gradient = self._in_flight.popleft()
        self._in_flight_bytes -= gradient.nbytes

    def drain(self, timeout_s: float, purpose: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._current()
        for stream in (*self._computing, *self._copy, self._add):
            done = stream.record_event()
            while not self._device.has_come(done):
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded([], f"{self._device} was still busy after {timeout_s:.1f} s: {purpose}")
                time.sleep(_POLL_S)
        self._computing.clear()
        self._in_flight.clear()
        self._in_flight_bytes = 0


class Waiting(Protocol):
    """A source of waits of kernels: staged copies, flags of peers."""

    def check(self) -> None:
        """After a drain: raises if a wait of a kernel has timed out since the last check."""


class AllStreams:
    """The streams of an engine, and of those that it absorbed, with what waits on them."""

    def __init__(self, first: Streams, *, timeout_s: float) -> None:
        self.first, self._timeout_s = first, timeout_s
        self._all = [first]
        self._waiting: list[Waiting] = []

    def join(self, other: AllStreams) -> None:
        self._all += other._all
        self._waiting += other._waiting

    def also(self, streams: Streams) -> None:
        """Makes a drain wait for these, too."""
        self._all.append(streams)

    def watch(self, waiting: Waiting) -> None:
        """Makes a drain report a wait of a kernel that timed out."""
        if waiting not in self._waiting:
            self._waiting.append(waiting)

    def computes_here(self) -> None:
        """Notes that modules compute on the current stream: a drain must wait for what they read of peers."""
        for streams in self._all:
            streams.computes_here()

    def drain(self, purpose: str) -> None:
        """Waits until this rank's device has done what was enqueued. Raises DeadlineExceeded."""
        for streams in self._all:
            streams.drain(self._timeout_s, purpose)
        for waiting in self._waiting:
            waiting.check()


class Target:
    """One parameter's gradient shards. `number`: its number in the plan; `shards`: rows per owner, in their order.

    `near`: as in `PeerShards`.
    """

    def __init__(
        self, *, number: int, shards: Sequence[torch.Tensor], rank: int, near: frozenset[int] | None = None
    ) -> None:
        self.number, self.shards, self._rank, self._near = number, tuple(shards), rank, near
        self.rows = [len(shard) for shard in shards]

    def add_rows(self, owner: int, at: int | torch.Tensor, rows: torch.Tensor) -> None:
        """Adds to an owner's shard, on the host. Nobody else may add to it meanwhile."""
        self.add_into(self.shards[owner], at, rows)

    def add_into(self, shard: torch.Tensor, at: int | torch.Tensor, rows: torch.Tensor) -> None:
        """Adds to rows that are summed as shards are."""
        add_rows(shard, at, rows)

    def begin_addition(self) -> None:
        """To each element at most once, except by index on the host. Each kernel adds to an element once."""

    def value(self, part: torch.Tensor) -> torch.Tensor:
        """A part of a shard in floating point, in its own memory: the same tensor for the same part."""
        return part

    @property
    def peers(self) -> PeerShards:
        """As kernels see it in this minibatch. Raises ValueError if the shards are not aligned, as in the CPU's joined
        heap.
        """
        return self.adding(self._peers)

    def adding(self, peers: PeerShards) -> PeerShards:
        """Shards of such sums, as kernels that add in this minibatch see them."""
        return peers

    @cached_property
    def _peers(self) -> PeerShards:
        shape = (sum(len(shard) for shard in self.shards), *self.shards[0].shape[1:])
        rank = self._rank if len(self.shards) > 1 else 0
        near = {self._rank} if self._near is None else self._near
        return PeerShards.of(self.shards, shape=shape, rank=rank, near=near & set(range(len(self.shards))))


class Transport(ABC):
    """One backend's way to peers: `heap`, the order of work on `streams`, and how gradients are added to owners' shards
    while other ranks do the same.
    """

    adds_by_kernel: bool

    def __init__(self, heap: SymmetricHeap, streams: Streams) -> None:
        self.heap, self.streams = heap, streams

    @abstractmethod
    def add(self, gradient: torch.Tensor, target: Target, *, name: str, waited: Callable[[Waits], None]) -> None:
        """Adds `gradient`, detached, whose rows are those of all shards together. `name`: the parameter's, for errors.

        `waited` gets the times, as (start_s, end_s), during which other ranks held it up.
        """

    @abstractmethod
    def sink(self, target: Target, *, name: str, waited: Callable[[Waits], None]) -> PeerShards | AddRows:
        """For an operator that makes a gradient tile by tile: shards to which its kernel adds, or a function."""

    @abstractmethod
    def add_sums(
        self, target: Target, owner: int, at: int, sums: torch.Tensor, *, name: str, waited: Callable[[Waits], None]
    ) -> None:
        """Adds sums, of the dtype of the shards, to an owner's rows from `at` on."""


class LockedTransport(Transport):
    """One lock per (parameter, owner). A lock that is taken is tried again later, so that ranks that arrive together
    work on different owners. Raises DeadlineExceeded with the holder's name.
    """

    adds_by_kernel = False
    heap: SharedMemoryHeap

    def __init__(self, heap: SharedMemoryHeap, streams: Streams, timeout_s: float) -> None:
        super().__init__(heap, streams)
        self._timeout_s = timeout_s
        self._threads: dict[int, threading.Lock] = {}  # by number; see [Note: traps of fcntl locks]

    def add(self, gradient: torch.Tensor, target: Target, *, name: str, waited: Callable[[Waits], None]) -> None:
        world = len(target.shards)
        turns = [(self.heap.rank + step) % world for step in range(world)]

        def add(gradient: torch.Tensor) -> None:
            target.begin_addition()
            rows = gradient.split_with_sizes(target.rows)
            pending = {owner: rows[owner] for owner in turns if rows[owner].numel()}
            waited(self._add(pending, target, name))

        self.streams.add(gradient, add)

    def sink(self, target: Target, *, name: str, waited: Callable[[Waits], None]) -> AddRows:
        target.begin_addition()

        def add(owner: int, at: int | torch.Tensor, rows: torch.Tensor) -> None:
            waited(self._add({owner: rows.detach()}, target, name, at))

        return add

    def add_sums(
        self, target: Target, owner: int, at: int, sums: torch.Tensor, *, name: str, waited: Callable[[Waits], None]
    ) -> None:
        waited(self._add({owner: sums}, target, name, at))

    def _add(self, pending: dict[int, torch.Tensor], target: Target, name: str, at: int | torch.Tensor = 0) -> Waits:
        """Adds the `pending` rows of each owner to its shard, from row `at` on; returns the long waits for locks."""
        waits: Waits = []
        with named("odc.accumulate"), self._threads.setdefault(target.number, threading.Lock()):
            stuck_s: float | None = None
            while pending:
                before_s = time.monotonic()
                left = {o: rows for o, rows in pending.items() if not self._try_add(rows, target, o, at)}
                if len(left) < len(pending):
                    if stuck_s is not None and before_s - stuck_s > _LONG_WAIT_S:
                        waits.append((stuck_s, before_s))
                    stuck_s = None
                else:
                    stuck_s = before_s if stuck_s is None else stuck_s
                    self._raise_if_late(before_s - stuck_s, target.number, next(iter(left)), name)
                    time.sleep(_NAP_S)
                pending = left
        return waits

    def _try_add(self, rows: torch.Tensor, target: Target, owner: int, at: int | torch.Tensor) -> bool:
        if not self.heap.try_lock(target.number, owner):
            return False
        try:
            target.add_rows(owner, at, rows)
        finally:
            self.heap.unlock(target.number, owner)
        return True

    def _raise_if_late(self, waited_s: float, number: int, owner: int, name: str) -> None:
        if waited_s > self._timeout_s:
            holder, first = self.heap.lock_holder(number, owner), self.heap.first
            ranks = [] if holder is None else [first + holder]
            raise DeadlineExceeded(
                ranks,
                f"rank {first + self.heap.rank} waited {waited_s:.1f} s to add its gradient of {name} to the shard of "
                f"rank {first + owner}: its lock is held by {f'rank {ranks[0]}' if ranks else 'another process'}",
            )


class KernelTransport(Transport):
    """The scatter kernel, on its own stream: additions are atomic, ranks never wait for each other."""

    adds_by_kernel = True

    def add(self, gradient: torch.Tensor, target: Target, *, name: str, waited: Callable[[Waits], None]) -> None:
        from odc_kernels.scatter import scatter  # here, as importing triton takes a second

        target.begin_addition()
        peers = target.peers
        self.streams.add(gradient.contiguous(), lambda gradient: scatter(gradient=gradient, peers=peers))

    def sink(self, target: Target, *, name: str, waited: Callable[[Waits], None]) -> PeerShards:
        self.streams.computes_here()  # the kernel that adds is launched on this stream
        target.begin_addition()
        return target.peers

    def add_sums(
        self, target: Target, owner: int, at: int, sums: torch.Tensor, *, name: str, waited: Callable[[Waits], None]
    ) -> None:
        from odc_kernels.scatter import add_block

        self.streams.computes_here()
        add_block(target=target.shards[owner][at : at + len(sums)], source=sums)
