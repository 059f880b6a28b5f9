"""Events: spans of each rank's time, from which timelines, idle shares and traces are made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

BUSY_KINDS = ("forward", "backward", "publish", "step", "rollout", "scoring")
IDLE_KINDS = ("wait",)
ELSEWHERE = "elsewhere: "  # how such an event's label begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One span of one rank's time.

    `start_s` and `end_s` are seconds of `time.monotonic()`, a clock that all processes on one machine share.
    `microbatch` is -1 for a span of a whole minibatch (a barrier, the optimizer step). Spans of one rank
    may nest (a `wait` within its `forward`); `wait` never contains another span.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    minibatch: int
    microbatch: int = -1
    label: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """What another process does for the rank, maybe while the rank itself computes."""
        return self.label.startswith(ELSEWHERE)

    def as_row(self) -> list:
        """Its fields in order, for JSON; the inverse of `Event.of_row`."""
        return [getattr(self, each.name) for each in fields(self)]

    @classmethod
    def of_row(cls, row: Sequence) -> Event:
        return cls(**dict(zip((each.name for each in fields(cls)), row, strict=True)))


class EventLog:
    """The last `capacity` events of one rank. Adding one is an append to a bounded deque."""

    def __init__(self, rank: int, capacity: int = 20_000) -> None:
        self.rank = rank
        self.minibatch = -1
        self.microbatch = -1
        self._events: deque[Event] = deque(maxlen=capacity)

    def add(self, kind: str, start_s: float, end_s: float, *, label: str = "", microbatch: int | None = None) -> None:
        microbatch = self.microbatch if microbatch is None else microbatch
        where = {"rank": self.rank, "minibatch": self.minibatch, "microbatch": microbatch}
        self._events.append(Event(kind=kind, start_s=start_s, end_s=end_s, label=label, **where))

    @contextmanager
    def span(self, kind: str, *, label: str = "", microbatch: int | None = None) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, start_s, time.monotonic(), label=label, microbatch=microbatch)

    @contextmanager
    def keeping(self, *kinds: str) -> Iterator[None]:
        """Keeps only spans of these kinds, of those that are added inside of it."""
        before = self.drain()
        try:
            yield
        finally:
            self._events.extend([*before, *(each for each in self.drain() if each.kind in kinds)])

    def drain(self) -> list[Event]:
        """All events so far, oldest first; the log is empty afterwards."""
        events = list(self._events)
        self._events.clear()
        return events


def total_s(events: Iterable[Event], *kinds: str) -> float:
    """Seconds spent in spans of the given kinds, summed."""
    return sum(event.end_s - event.start_s for event in events if event.kind in kinds)
