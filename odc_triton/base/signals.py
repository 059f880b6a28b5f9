"""Signals: a handler for the duration of a block, and requests to stop (SIGTERM, Ctrl-C) told from their echoes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

STOPS = (signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_S = 1.0  # a terminal sends Ctrl-C to all processes and a launcher forwards it: that is one request


@contextmanager
def handling(handler: Callable[[int, Any], Any], *numbers: int) -> Iterator[None]:
    """Calls `handler` for these signals until the block ends. Does nothing outside the main thread, which gets them."""
    before: dict[int, Any] = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, handler)
    except ValueError:  # not in the main thread
        pass
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class StopRequest:
    """The first signal by which this process was asked to stop, and whether a later one is another request."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._heard_s = 0.0

    def hear(self, number: int) -> Literal["first", "same", "second"]:
        """Takes a signal. "same": it came right after the first, from a process that passed on the same request."""
        if self.signal is None:
            self.signal, self._heard_s = number, time.monotonic()
            return "first"
        return "second" if time.monotonic() - self._heard_s > _SAME_REQUEST_S else "same"
