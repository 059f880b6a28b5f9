"""Signals that rows are there, waits for rows, additions to them: by the host, or by its device.

The host waits on a CPU. On a GPU the host only enqueues, so kernels set flags, wait for them and add
(kernels/flags.py); a wait that timed out is known after a drain.

[Note: forward progress] A kernel that waits holds its stream, and may hold others: streams share hardware queues, a
module may be loaded or memory allocated behind it, the queue of launches may be full. None of this can hang a GPU, as
long as nothing would hang if all work of a rank, on whatever streams, ran one after another in the order in which it
was enqueued. So: never enqueue a wait before the work that a peer needs to set that flag. For each layer and wave a
rank enqueues what it publishes before it reads, and its additions before it collects. That is also the order on the
host, and [Note: waves] in plan/segments.py shows that it ends.
The staged kernel obeys it too: copies are enqueued before the kernel that waits for them (kernels/staged.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from odc_kernels.streams import Device, device_of

from ..base.errors import DeadlineExceeded, PeerFailed
from ..comm.barrier import Barrier
from ..comm.memory.heap import SharedMemoryHeap
from ..engine.protocol import Protocol
from .buffers import Flag, KVBuffers

_NAP_S = 20e-6
_SHORT_S = 0.01  # most waits end within it: the ranks of a wave compute the same layer
_SHOWN_S = 0.1  # peers see longer ones: to other replicas that takes a message each
_LOOK_S = 0.02
_READ_S = 1.0  # for a copy of some hundred bytes
_JOIN_S = 10.0  # more than a look takes
_SPINS_PER_S = 2e6  # more than a GPU makes: the watch ends a wait in time, this only if the host is gone


OwnFlag = tuple[Flag, int, int]  # with its layer and epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """For flags of one kind and layer, until they are at least `epoch`. `whom`: by rank, what for; `sets_next`: the
    flag, layer and epoch of its own flags that this rank sets next; None: it has just set those that it waits for.
    """

    flag: Flag
    layer: int
    epoch: int
    whom: dict[int, str]
    sets_next: OwnFlag | None = None


class ShownWaits:
    """What each rank of all replicas waits for, so that a peer can find who holds up whom."""

    def __init__(self, buffers: KVBuffers, barrier: Barrier) -> None:
        self._layers, self._first, self._world = buffers.layers, buffers.heap.first, barrier.world
        self._far = 2 * len(Flag) * (self._layers + 1)  # more than two places of one pass are apart
        self._waits = barrier.status()  # where the rank waits, and what for and for whom; 0: it does not
        self._shown = 0
        barrier.blocked_on.append(self.blocked_on)

    def _place(self, flag: Flag, layer: int, epoch: int) -> int:
        """Of a flag, in the order in which every rank sets its own: even, and odd just after it has set them."""
        step = layer if epoch % 2 else self._layers - 1 - layer  # backwards go through the layers in reverse
        return ((epoch * self._layers + step) * len(Flag) + flag) * 2

    def show(self, wait: Wait, *, writer: int) -> None:
        """Shows peers that this rank waits for `writer`."""
        is_set = self._place(wait.flag, wait.layer, wait.epoch) + 1
        place = is_set if wait.sets_next is None else self._place(*wait.sets_next)
        self._show((place * self._far + place - is_set + 1) * self._world + self._first + writer)

    def show_none(self) -> None:
        self._show(0)

    def _show(self, number: int) -> None:
        if number != self._shown:
            self._shown = number
            self._waits.show(number)

    def blocked_on(self, rank: int) -> int | None:
        """The rank that `rank` is blocked on, both as in messages. None if it shows no wait, or one that must be over,
        as the other rank is past the flag: a rank that was stopped can't take back what it shows.
        """
        shown = [divmod(number, self._world) for number in self._waits.seen()]
        number, writer = shown[rank]
        place, past = divmod(number, self._far)
        return None if number == 0 or shown[writer][0] // self._far >= place + 1 - past else writer


class HostSync:
    """By the host."""

    def __init__(self, buffers: KVBuffers, state: Protocol) -> None:
        self.buffers, self._state, self._barrier = buffers, state, state.barrier
        self.waits = ShownWaits(buffers, self._barrier)

    @property
    def number(self) -> int:
        """Of the plan that is open, or may be later in the minibatch: the same on all ranks, and no other plan's."""
        return self._barrier.passed

    def begin(self) -> None:
        """The next plan is open."""

    def end(self) -> None:
        """It is over on this rank."""

    def signal(self, flag: Flag, ranks: Iterable[int], layer: int, epoch: int) -> None:
        """Sets this rank's flag at each of `ranks`, after all that the current stream did before."""
        for rank in ranks:
            self.buffers.flags(flag, rank)[self.buffers.rank, layer] = epoch

    def wait(self, wait: Wait) -> None:
        """Until all its flags are there: the host, or the current stream.

        Raises RankLost, DeadlineExceeded, PeerFailed if a rank that it waits for, or that holds that one up, has
        failed; by the device not before `check`.
        """
        for rank, purpose in wait.whom.items():
            self._wait_for(wait, rank, purpose)

    def _wait_for(self, wait: Wait, rank: int, purpose: str) -> None:
        if self._has_come(wait, rank):
            return
        with self._state.events.span("wait", label=purpose):
            until_s = time.monotonic() + _SHORT_S
            while time.monotonic() < until_s:
                if self._has_come(wait, rank):
                    return
                time.sleep(_NAP_S)
            shown_s = time.monotonic() + _SHOWN_S - _SHORT_S
            self._barrier.wait_until(purpose, lambda: self._late(wait, rank, purpose, shown_s))
            self.waits.show_none()  # not after an error: peers that look later must find the same cause

    def _has_come(self, wait: Wait, rank: int) -> bool:
        return int(self.buffers.flags(wait.flag, self.buffers.rank)[rank, wait.layer]) >= wait.epoch

    def _failed(self) -> list[int]:
        """Ranks, as in messages, that can't complete the plan."""
        seen = enumerate(self.buffers.failed.seen(), self.buffers.heap.first)
        return [rank for rank, number in seen if number == self.number]

    def _late(self, wait: Wait, rank: int, purpose: str, shown_s: float) -> list[int]:
        if self._has_come(wait, rank):
            return []
        if time.monotonic() >= shown_s:
            self.waits.show(wait, writer=rank)
        self.require_none_failed(purpose)
        return [self.buffers.heap.first + rank]

    def require_none_failed(self, purpose: str) -> None:
        if failed := self._failed():
            self.waits.show_none()
            names, rank = ", ".join(f"rank {rank}" for rank in failed), self.buffers.heap.first + self.buffers.rank
            raise PeerFailed(failed, f"rank {rank} waited for {purpose}, and {names} failed")

    def add(self, shown: Wait, owner: int, place: torch.Tensor, rows: torch.Tensor, purpose: str) -> None:
        """Adds `rows` to `place`, which is in `owner`'s buffers, while others may add too. `shown`: to peers, while
        another rank holds the lock.
        """
        heap, start_s, layer = self.buffers.heap, time.monotonic(), shown.layer
        assert isinstance(heap, SharedMemoryHeap), "a GPU's gradients are added by KernelSync"
        while not heap.try_lock(layer, owner):
            waited_s, holder = time.monotonic() - start_s, heap.lock_holder(layer, owner)
            if waited_s > _SHOWN_S and holder is not None:
                self.waits.show(shown, writer=holder)
            if waited_s > self._barrier.timeout_s:
                ranks = [] if holder is None else [heap.first + holder]
                by = f"rank {ranks[0]}" if ranks else "another process"
                words = f"rank {heap.first + heap.rank} could not add the {purpose}, whose lock is held by {by}"
                self._barrier.raise_late(purpose, DeadlineExceeded(ranks, words))
            time.sleep(_NAP_S)
        self.waits.show_none()
        try:
            place.add_(rows)
        finally:
            heap.unlock(layer, owner)

    def fail(self) -> None:
        """Ends the waits of ranks that need this one's segments."""
        self.buffers.failed.show(self.number)

    def check(self) -> None:
        """After a drain: raises as `wait` if a wait of the device timed out."""


@dataclass(slots=True)
class _Running:
    """A wait that the device may be in. `event`: follows it on a GPU; elsewhere it is over when the launch is."""

    wait: Wait
    event: Any = None
    is_over: bool = False

    def over(self) -> bool:
        return self.event.query() if self.event is not None else self.is_over


class _Look:
    """Reads this rank's flags while its device may be stuck in a wait: by another stream, into memory of the host.

    It polls an event, as other work may share its stream, and as torch's `set_sync_debug_mode` makes a synchronisation
    an error in all threads. `on`: a device to use instead of a GPU, to simulate one.
    """

    def __init__(self, buffers: KVBuffers, on: Device | None = None) -> None:
        self._room, self._on = buffers, on or device_of(buffers.flags(Flag(0), buffers.rank))
        if self._on is not None:
            self._seen = torch.zeros(len(Flag), buffers.world, buffers.layers, dtype=torch.int64)
            self._seen = self._seen.pin_memory() if buffers.heap.device.type == "cuda" else self._seen
            self._stream, self._reads = self._on.stream(), dict[Flag, Any]()

    def at(self, flag: Flag) -> torch.Tensor:
        """int64 [writer, layer]; what was read last if the device does not answer, which can only be too small."""
        flags = self._room.flags(flag, self._room.rank)
        if self._on is None:
            return flags
        seen, read = self._seen[flag], self._reads.get(flag)
        # One read of a kind at a time: a device that does not answer must not be given so many that launches block.
        if read is None or self._on.has_come(read):
            self._on.enqueue(self._stream, lambda: seen.copy_(flags, non_blocking=True))
            read = self._reads[flag] = self._stream.record_event()
        until_s = time.monotonic() + _READ_S
        while not self._on.has_come(read) and time.monotonic() < until_s:
            time.sleep(_NAP_S)
        return seen


class KernelSync(HostSync):
    """By the device.

    A thread watches while a plan is open, as the host may be stuck behind the device: when a rank dies or fails, or a
    wait takes longer than the deadline, it ends all waits. Results are rubbish then, and `check` raises.
    """

    def __init__(self, buffers: KVBuffers, state: Protocol) -> None:
        super().__init__(buffers, state)
        device, ranks = buffers.heap.device, range(buffers.world)
        self._tables = {
            flag: torch.tensor([buffers.flags(flag, rank).data_ptr() for rank in ranks], device=device) for flag in Flag
        }
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32)
        if device.type == "cuda":
            self._stop = self._stop.pin_memory()  # the host can set it while the device is busy
        self._look = _Look(buffers)
        self._waits: list[Wait] = []
        # As of the stop: since then flags may have been set, and ranks may have exited.
        self._late_at_stop: list[int] = []
        self._gone_at_stop: list[int] = []
        self._running: deque[_Running] = deque()
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None

    def begin(self) -> None:
        self.end()
        if self._watcher is not None:
            self._watcher.join(_JOIN_S)  # else it may stop the next plan for what it saw of this one
            if self._watcher.is_alive():
                raise RuntimeError(f"the GPU did not answer the thread that watches its waits for {_JOIN_S:.0f} s")
        super().begin()
        self._waits.clear()
        self._running.clear()
        self._late_at_stop, self._gone_at_stop = [], []
        self._stop[0] = 0
        self.waits.show_none()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(self._is_over,), name="odc-split", daemon=True)
        self._watcher.start()

    def end(self) -> None:
        self._is_over.set()

    def signal(self, flag: Flag, ranks: Iterable[int], layer: int, epoch: int) -> None:
        from odc_kernels.flags import set_flags  # here, as importing triton takes a second

        table, place = self._tables[flag], self.buffers.rank * self.buffers.layers + layer
        set_flags(table=table, ranks=ranks, place=place, value=epoch)

    def wait(self, wait: Wait) -> None:
        from odc_kernels.flags import await_flags

        self._waits.append(wait)
        running = _Running(wait)
        self._running.append(running)
        await_flags(
            flags=self.buffers.flags(wait.flag, self.buffers.rank),
            ranks=wait.whom,
            place=wait.layer,
            value=wait.epoch,
            stop=self._stop,
            status=self._status,
            number=len(self._waits),
            spins=int(min(self._barrier.timeout_s, 3600) * _SPINS_PER_S),
        )
        if self._status.is_cuda:
            running.event = torch.cuda.current_stream(self._status.device).record_event()
        running.is_over = True

    def _watch(self, is_over: threading.Event) -> None:
        heap, since_s, first = self.buffers.heap, time.monotonic(), None
        if heap.device.type == "cuda":
            torch.cuda.set_device(heap.device)  # a thread begins with GPU 0, and would open a context there
        while not is_over.wait(_LOOK_S):
            while self._running and self._running[0].over():
                self._running.popleft()
            if not self._running:
                self.waits.show_none()
                continue
            running = self._running[0]
            if running is not first:
                since_s, first = time.monotonic(), running
            late = self._late_of(running.wait)
            if not late:
                self.waits.show_none()
            elif time.monotonic() - since_s >= _SHOWN_S:
                self.waits.show(running.wait, writer=late[0])
            is_late = time.monotonic() - since_s > self._barrier.timeout_s
            # A rank that died before setting its flag is fatal; any other failure is reported by that rank.
            gone = [rank for rank in late if not heap.is_alive(rank)]
            if is_late or self._failed() or (gone and set(gone) & set(self._late_of(running.wait))):
                self._late_at_stop, self._gone_at_stop = late, gone
                self._stop[0] = 1
                return

    def _late_of(self, wait: Wait) -> list[int]:
        """The ranks whose flags have not come."""
        flags = self._look.at(wait.flag)
        return [rank for rank in wait.whom if int(flags[rank, wait.layer]) < wait.epoch]

    def add(self, shown: Wait, owner: int, place: torch.Tensor, rows: torch.Tensor, purpose: str) -> None:
        from odc_kernels.scatter import add_block

        add_block(target=place, source=rows)

    def fail(self) -> None:
        super().fail()
        self._stop[0] = 1

    def check(self) -> None:
        number = int(self._status)
        if number == 0:
            return
        self._status.zero_()
        wait, first = self._waits[number - 1], self.buffers.heap.first
        late = [rank for rank in self._late_at_stop if rank in wait.whom]
        late = late or [rank for rank in wait.whom if not self._has_come(wait, rank)] or list(wait.whom)
        purpose, gone = wait.whom[late[0]], [first + rank for rank in self._gone_at_stop]
        self.require_none_failed(purpose)
        self._barrier.require_alive(gone, purpose, lambda: gone)
        ranks = self._barrier.root_cause([first + rank for rank in late])
        names = ", ".join(f"rank {rank}" for rank in ranks)
        words = f"rank {first + self.buffers.rank} waited for {names} at '{purpose}': the deadline has passed"
        self._barrier.raise_late(purpose, DeadlineExceeded(ranks, words))
