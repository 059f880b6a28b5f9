"""The clocks of ranks that run the units of a model: compute, reads of parameters, adds of gradients.

Every rank has three streams. Unit k, with its read, its work and its add, follows these rules (all of them are maxima
of earlier ends, so a pass over the units in order is the whole discrete-event simulation):

    a read starts when the read before it has ended and unit k - 2 is over (two buffers: the current and the next);
        without `prefetch`, when unit k - 1 is over
    work starts when the work before it and its own read have ended
    an add starts when its work and the add before it have ended; the work after it waits for the add before it (one
        gradient buffer in flight); without `overlap`, for the add itself
    a collective read or add starts on all ranks when the last one is ready

If reads and adds take no time, and with neither prefetch nor overlap, a run with collectives takes the paper's sum over
units of the max over ranks; a run without collectives takes the max over ranks of the sum.

`EventRecorder` keeps the ranks' spans as events, like a measured run; `Outcome` is the result of a simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ...base.events import Event

Clock = np.ndarray | float  # seconds: (trials, ranks), or the same on all
Sync = Callable[[Clock], Clock]
Record = Callable[[str, Clock, Clock, str], None]


def last_rank(ready: np.ndarray) -> np.ndarray:
    """The time at which the last rank of each trial is ready. (trials, ranks) -> (trials, 1), seconds."""
    return ready.max(axis=-1, keepdims=True)


class Lanes:
    """Clocks in seconds since the minibatch's entry, (trials, ranks).

    `busy`, `exposed` and `waited`: seconds of work, of transfers that work waited for, and of waiting for other ranks.
    `shares`: of a unit's work, what is computing, and what is transfers of keys and values; in the rest of it the rank
    waits for the others of its wave.
    """

    shares: tuple[Clock, Clock] = (1.0, 0.0)

    def __init__(
        self, zero: np.ndarray, *, prefetch: bool, overlap: bool, sm_share: float, record: Record | None
    ) -> None:
        self.compute = self.read = self.add = self.before = zero
        self.busy = self.exposed = self.waited = self._last_add_s = zero
        self._prefetch, self._overlap, self._sm_share, self._record = prefetch, overlap, sm_share, record

    def unit(
        self,
        work_s: Clock,
        kind: str,
        *,
        read_s: Clock | None = None,
        add_s: Clock | None = None,
        sync: Sync | None = None,
    ) -> None:
        """One unit's forward or backward. `sync` makes its read and its add collectives."""
        came = start = self.compute
        if read_s is not None:
            ready = np.maximum(self.read, self.before if self._prefetch else came)
            self.read = (sync(ready) if sync else ready) + read_s
            start = np.maximum(came, self.read)
            self._waits(came, start, read_s, "all-gather" if sync else "gather")
        if self._sm_share:  # transfers take SMs while they last
            transfers_s = (0.0 if read_s is None else read_s) + (0.0 if add_s is None else add_s)
            work_s = work_s + self._sm_share * np.minimum(transfers_s, work_s / (1 - self._sm_share))
        end = start + work_s
        busy_s, moved_s = work_s * self.shares[0], work_s * self.shares[1]
        self.busy = self.busy + busy_s
        self.exposed = self.exposed + moved_s
        self.waited = self.waited + (work_s - busy_s - moved_s)
        if self._record:
            self._record(kind, start, start + busy_s, "")
            self._record("wait", start + busy_s, end, "keys and values")
        if add_s is not None:
            label = "reduce-scatter" if sync else "scatter"
            free = np.maximum(end, self.add)
            self._waits(end, free, self._last_add_s, label)
            self.add = (sync(free) if sync else free) + add_s
            self._last_add_s = add_s
            end = free
            if not self._overlap:
                self._waits(end, self.add, add_s, label)
                end = self.add
        self.before, self.compute = came, end

    def drain(self) -> None:
        """Waits for the last add."""
        end = np.maximum(self.compute, self.add)
        self._waits(self.compute, end, self._last_add_s, "scatter at the end")
        self.compute = end

    def _waits(self, start: Clock, end: Clock, transfer_s: Clock, label: str) -> None:
        wait = end - start
        exposed = np.minimum(wait, transfer_s)
        self.exposed = self.exposed + exposed
        self.waited = self.waited + (wait - exposed)
        if self._record:
            self._record("wait", start, end, label)


class EventRecorder:
    """The first trial's spans as events. Neighbouring spans of one kind and microbatch become one."""

    def __init__(self, ranks: int, entry_s: float) -> None:
        self.events: list[Event] = []
        self.microbatch = 0
        self._entry_s = entry_s
        self._open: list[Event | None] = [None] * ranks
        if entry_s:
            for rank in range(ranks):
                self._add(rank, "wait", -entry_s, 0.0, "enter")

    def record(self, kind: str, start: Clock, end: Clock, label: str) -> None:
        shape = len(self._open)
        starts, ends = (np.broadcast_to(np.atleast_2d(each)[0], shape).tolist() for each in (start, end))
        for rank, (start_s, end_s) in enumerate(zip(starts, ends, strict=True)):
            self._add(rank, kind, start_s, end_s, label)

    def finish(self, over: np.ndarray, last: float, barrier_s: float, tail_s: float) -> None:
        """The exit barrier, and the tail after it."""
        self.microbatch = -1
        for rank, own in enumerate(over.tolist()):
            self._add(rank, "wait", own, last + barrier_s, "exit", always=True)
            if tail_s:
                self._add(rank, "step", last + barrier_s, last + barrier_s + tail_s, "")
            self._close(rank)

    def _add(self, rank: int, kind: str, start_s: float, end_s: float, label: str, always: bool = False) -> None:
        start_s, end_s = start_s + self._entry_s, end_s + self._entry_s
        if end_s <= start_s and not always:
            return
        last = self._open[rank]
        microbatch = -1 if label in ("enter", "exit", "scatter at the end") else self.microbatch
        key = (kind, microbatch, label)
        if last is not None and (last.kind, last.microbatch, last.label) == key and last.end_s == start_s:
            start_s = last.start_s
        else:
            self._close(rank)
        self._open[rank] = Event(
            rank=rank, kind=kind, start_s=start_s, end_s=end_s, minibatch=0, microbatch=microbatch, label=label
        )

    def _close(self, rank: int) -> None:
        if self._open[rank] is not None:
            self.events.append(self._open[rank])
            self._open[rank] = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One setting over several minibatches (trials).

    For each rank's minibatch `seconds` = `busy_s` + `exposed_s` + `waited_s` + `tail_s`.

    schedule: that of the ranks.
    seconds: of each minibatch, (trials,).
    busy_s, exposed_s, waited_s: of each rank, (trials, ranks): the time in which it computes, in which compute waits
        for its own bytes, and in which it waits for other ranks.
    tail_s: the optimizer step, publishing, and transfers between nodes at the end: the same on every rank.
    """

    schedule: str
    seconds: np.ndarray
    busy_s: np.ndarray
    exposed_s: np.ndarray
    waited_s: np.ndarray
    tail_s: float
    microbatches: list[list[int]]
    """Per trial, of each rank."""
    peak_bytes: int | None
    """The fullest rank's, including the activations of its largest microbatch; None without a model."""
    events: list[Event] = field(default_factory=list)
    """The first trial's timeline if requested, in the form of the engine's events."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a minibatch."""
        return float(self.seconds.mean())

    @property
    def idle(self) -> np.ndarray:
        """Share of the time in which each rank neither computes nor steps, 0 to 1, (ranks,)."""
        return 1 - (self.busy_s.sum(axis=0) + self.tail_s * len(self.seconds)) / self.seconds.sum()

    @property
    def idle_share(self) -> float:
        return float(self.idle.mean())

    @property
    def exposed_share(self) -> float:
        """Share of the ranks' time in which compute waits for its own bytes."""
        return float(self.exposed_s.sum() / (self.seconds.sum() * self.exposed_s.shape[1]))
