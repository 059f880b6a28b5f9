"""A CPU that behaves like a GPU with several streams, in the worst order that a GPU is allowed; and backends on it.

On a GPU the host only enqueues. Work on one stream runs in order; between two streams only waits guarantee an order. A
missing wait goes unnoticed for as long as the device happens to be quick. Here it shows:

- "late": work stays in a queue until something waits for it: a stream that computes, a drain.
- "early": work is done as soon as it is enqueued.

In both, memory is filled with NaN when it is allocated or freed, work in memory that was freed meanwhile raises, and
work on a side stream that did not wait for a computation finds NaN where its result would have been.

[Note: the host computes] The host computes what modules compute, when they are called. So the current stream does its
waits at once, and "late" is true only of side streams and of what the engine enqueues by `Streams.compute`. A GPU may
be later still.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from odc_kernels.streams import Memory
from odc_triton.comm.layout import ParameterSpec
from odc_triton.comm.memory.heap import ApartHeap
from odc_triton.engine.transport import DeviceStreams, Streams
from odc_triton.sharding.backend import BACKENDS, CpuBackend

KINDS = ("late", "early")


@dataclass(slots=True)
class _Work:
    """`memory`: the storage that it reads or fills, by address of its object; `freed`: it was freed meanwhile."""

    do: Callable[[], None]
    memory: int | None = None
    freed: bool = False


class SimulatedEvent:
    """A place in a stream's order."""

    stream: SimulatedStream
    place: int
    time: int

    def query(self) -> bool:
        return self.stream.done >= self.place

    def reach(self) -> None:
        """Makes the stream do all that comes before."""
        self.stream.run_to(self.place)


class SimulatedStream:
    """As torch.cuda.Stream, as far as `DeviceStreams` goes. `computes`: it is or was current."""

    def __init__(self, device: SimulatedDevice, *, computes: bool) -> None:
        self._device, self.computes = device, computes
        self.queue: deque[_Work] = deque()
        self.enqueued = self.done = 0
        self.followed: dict[SimulatedStream, int] = {}  # another stream, as it was at this time

    def push(self, work: _Work) -> None:
        self.queue.append(work)
        self.enqueued += 1
        if self._device.kind == "early":
            self.run_to(self.enqueued)

    @torch.no_grad()
    def run_to(self, place: int) -> None:
        with self._device.lock:
            while self.done < place:
                work = self.queue.popleft()
                self.done += 1
                if work.freed:
                    raise RuntimeError(
                        "a stream uses memory that was freed before the stream got to it: a wait is missing"
                    )
                work.do()

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent()
        event.stream, event.place, event.time = self, self.enqueued, self._device.time
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        self.followed[event.stream] = event.time
        stream, place = event.stream, event.place  # as it is now: it may be recorded again
        if self.computes:  # see [Note: the host computes]
            stream.run_to(place)
        else:
            self.push(_Work(lambda: stream.run_to(place)))

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.record_event())


class SimulatedDevice:
    """`kind`: "late" or "early". Raises ValueError for another."""

    def __init__(self, kind: str = "late") -> None:
        if kind not in KINDS:
            kinds = " or ".join(map(repr, KINDS))
            raise ValueError(f"streams are simulated {kinds}, not {kind!r} (see ODC_SIMULATED_STREAMS)")
        self.kind = kind
        self.time = 0  # counts all that is enqueued
        self.lock = threading.RLock()
        self.streams = [SimulatedStream(self, computes=True)]
        self._current = self.streams[0]
        self._pull: SimulatedStream | None = None

    def __str__(self) -> str:
        return f"the simulated device ({self.kind})"

    def current(self) -> SimulatedStream:
        return self._current

    @contextmanager
    def computing_on(self, stream: SimulatedStream) -> Iterator[None]:
        """`stream` is current within."""
        before, self._current, stream.computes = self._current, stream, True
        try:
            yield
        finally:
            self._current = before

    def stream(self) -> SimulatedStream:
        self.streams.append(SimulatedStream(self, computes=False))
        return self.streams[-1]

    def pull_stream(self) -> SimulatedStream:
        self._pull = self._pull or self.stream()
        return self._pull

    def enqueue(self, stream: SimulatedStream, work: Callable[..., None], memory: Memory = None) -> None:
        follows = stream is self._current or stream.followed.get(self._current) == self.time
        self.time += 1
        if memory is None:
            stream.push(_Work(work))
            return
        if isinstance(memory, torch.Tensor):
            # The storage alone, not the tensor: it must show when the owner frees the tensor.
            alias = memory.detach()
            storage, do = alias.untyped_storage(), lambda: work(alias)
            weakref.finalize(memory, self._freed_by_owner, storage).atexit = False
        else:
            storage, do = memory, work
        if not follows:
            do = _in_poison(storage, do)
        stream.push(_Work(do, storage._cdata))

    def allocate(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        storage.resize_(size_bytes)
        _poison(storage)

    def free(self, storage: torch.UntypedStorage) -> None:
        for work in self._enqueued_in(storage):
            work.freed = True
        _poison(storage)
        storage.resize_(0)

    def _freed_by_owner(self, storage: torch.UntypedStorage) -> None:
        enqueued = self._enqueued_in(storage)
        # `storage` itself, the tensor that goes now, and the one that the enqueued work holds.
        if torch._C._storage_Use_Count(storage._cdata) > 2 + len(enqueued):
            return  # another tensor has this memory
        for work in enqueued:
            work.freed = True
        _poison(storage)

    def _enqueued_in(self, storage: torch.UntypedStorage) -> list[_Work]:
        return [work for stream in self.streams for work in stream.queue if work.memory == storage._cdata]

    def has_come(self, event: SimulatedEvent) -> bool:
        event.reach()
        return True


def _poison(storage: torch.UntypedStorage) -> None:
    """All bits set: NaN in every floating-point format."""
    if storage.nbytes():
        storage.fill_(0xFF)


def _in_poison(storage: torch.UntypedStorage, do: Callable[[], None]) -> Callable[[], None]:
    def poisoned() -> None:
        _poison(storage)
        do()
        _poison(storage)

    return poisoned


class ApartBackend(CpuBackend):
    """CUDA's behaviour on the CPU: shards apart, whole tensors gathered and freed, streams that run as late as allowed.

    With ODC_SIMULATED_STREAMS=early they do everything at once.
    """

    name = "cpu-sharded"
    apart = True
    heap = ApartHeap

    def streams(self) -> Streams:
        return DeviceStreams(SimulatedDevice(os.environ.get("ODC_SIMULATED_STREAMS", "late")))


class InterpreterBackend(ApartBackend):
    """As `ApartBackend`, but gradients are added by the scatter kernel, which Triton's interpreter runs."""

    name = "cpu-interpreter"
    adds_by_kernel = True

    def check(self, specs: list[ParameterSpec]) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(f"backend={self.name!r}: set TRITON_INTERPRET=1 before triton is imported")
        super().check(specs)


BACKENDS |= {each.name: each for each in (ApartBackend, InterpreterBackend)}
