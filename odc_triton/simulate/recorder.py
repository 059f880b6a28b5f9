"""What a simulated minibatch's ranks did when, in the form of a measured run's events."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..base.events import Event
from .lanes import Clock


class Recorder:
    """The first trial's spans as events. Neighbouring spans of one kind and microbatch become one."""

    def __init__(self, ranks: int, entry_s: float) -> None:
        self.events: list[Event] = []
        self.microbatch = 0
        self._entry_s = entry_s
        self._open: list[Event | None] = [None] * ranks
        if entry_s:
            for rank in range(ranks):
                self._add(rank, "wait", -entry_s, 0.0, "enter")

    def of_all(self, kind: str, start: Clock, end: Clock, label: str) -> None:
        shape = len(self._open)
        starts, ends = (np.broadcast_to(np.atleast_2d(each)[0], shape).tolist() for each in (start, end))
        for rank, (start_s, end_s) in enumerate(zip(starts, ends, strict=True)):
            self._add(rank, kind, start_s, end_s, label)

    def of_rank(self, rank: int) -> Callable[[str, Clock, Clock, str], None]:
        return lambda kind, start, end, label: self._add(rank, kind, start, end, label)

    def finish(self, over: np.ndarray, last: float, meeting_s: float, tail_s: float) -> None:
        """The exit meeting, and what follows it."""
        self.microbatch = -1
        for rank, own in enumerate(over.tolist()):
            self._add(rank, "wait", own, last + meeting_s, "exit", always=True)
            if tail_s:
                self._add(rank, "step", last + meeting_s, last + meeting_s + tail_s, "")
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
