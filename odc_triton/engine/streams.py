"""The order of a rank's device work: what is computed, copied from peers, and added to peers."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from odc_kernels.streams import Device

from ..base.errors import DeadlineExceeded

# A stream reads one owner at a time, and ranks are not in step, so which one is as good as random. Of the links of 8
# owners, 8 ranks with one stream each keep 1 - (7/8)^8 = 0.66 busy, with two 0.90, with three 0.98. A third would cost
# the host one more call per unit.
COPY_STREAMS = 2
_POLL_S = 50e-6
_IN_FLIGHT_BYTES = 512 * 2**20


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
        """What is computed from here on follows the copies."""

    def free(self, storage: torch.UntypedStorage, copies: Copies) -> None:
        """Frees memory: anything that reuses it follows the copies into it and what read them."""
        storage.resize_(0)

    def add(self, gradient: torch.Tensor, work: Callable[[torch.Tensor], None]) -> None:
        """Adds `gradient` to peers, by `work`, after all computation enqueued before."""
        work(gradient)

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
class _Copies(Copies):
    """`home`: the stream that was current when they began, on which their memory was allocated. `done`: events after
    all copies. `users`: the streams that wait for them already.
    """

    home: Any
    done: list[Any]
    users: list[Any]


class DeviceStreams(Streams):
    """A device's: copies from peers and additions to peers have their own streams, beside the current one.

    [Note: memory of side streams] The caching allocator knows one stream per block, the one that was current when
    the block was allocated. So every block that side streams work on is allocated on the current stream, and freed
    only when that stream follows the work of all of them: whole parameters by `free`; gradients when their addition is
    seen to be done or, when more than `in_flight_bytes` are held, once the current stream waits for the oldest.
    `Tensor.record_stream` would work too, but would block reuse for as long as the host runs ahead.

    The caller chooses the current stream and may change it within a minibatch: `drain` waits for all that were current.
    """

    def __init__(self, device: Device, *, in_flight_bytes: int = _IN_FLIGHT_BYTES) -> None:
        self.device = device
        self._copy, self._add = [device.stream() for _ in range(COPY_STREAMS)], device.stream()
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        self._in_flight_bytes, self._most_bytes = 0, in_flight_bytes
        self._computing: dict[Any, None] = {}  # what was current since the last drain, in that order

    def _current(self) -> Any:
        stream = self.device.current()
        self._computing[stream] = None
        return stream

    def compute(self, work: Callable[[], None]) -> None:
        self.device.enqueue(self._current(), work)

    def computes_here(self) -> None:
        self._current()

    def allocate(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        self.device.allocate(storage, size_bytes)

    def copy(self, storage: torch.UntypedStorage, *works: Callable[[], None]) -> _Copies:
        copies = _Copies(home=self._current(), done=[], users=[])
        for work, stream in zip(works, itertools.cycle(self._copy), strict=False):
            stream.wait_stream(copies.home)
            self.device.enqueue(stream, work, storage)
            copies.done.append(stream.record_event())
        return copies

    def wait(self, copies: _Copies) -> None:
        if (current := self._current()) not in copies.users:
            for done in copies.done:
                current.wait_event(done)
            copies.users.append(current)

    def free(self, storage: torch.UntypedStorage, copies: _Copies) -> None:
        for done in copies.done:
            copies.home.wait_event(done)
        for user in copies.users:
            if user != copies.home:
                copies.home.wait_stream(user)
        self.device.free(storage)

    def add(self, gradient: torch.Tensor, work: Callable[[torch.Tensor], None]) -> None:
        self._add.wait_stream(self._current())
        self.device.enqueue(self._add, work, gradient)
        self._in_flight.append((self._add.record_event(), gradient))
        self._in_flight_bytes += gradient.nbytes
        while self._in_flight and self._in_flight[0][0].query():
            self._let_go()
        while self._in_flight_bytes > self._most_bytes:
            self._current().wait_event(self._in_flight[0][0])
            self._let_go()

    def after_adds(self, work: Callable[[], None]) -> None:
        self.device.enqueue(self._add, work)

    def go_on(self) -> None:
        self.device.has_come(self._add.record_event())

    def another(self) -> DeviceStreams:
        return DeviceStreams(self.device, in_flight_bytes=self._most_bytes)

    def _let_go(self) -> None:
        _, gradient = self._in_flight.popleft()
        self._in_flight_bytes -= gradient.nbytes

    def drain(self, timeout_s: float, purpose: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._current()
        for stream in (*self._computing, *self._copy, self._add):
            done = stream.record_event()
            while not self.device.has_come(done):
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded([], f"{self.device} was still busy after {timeout_s:.1f} s: {purpose}")
                time.sleep(_POLL_S)
        self._computing.clear()
        self._in_flight.clear()
        self._in_flight_bytes = 0


class Waiting(Protocol):
    """What makes kernels wait: staged copies, flags of peers."""

    def check(self) -> None:
        """After a drain: raises if a kernel has waited in vain since the last check."""


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
        """Makes a drain report a kernel that waited in vain."""
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
