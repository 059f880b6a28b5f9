"""Signals: a handler for the duration of a block, and requests to stop (SIGTERM, Ctrl-C) without their duplicates."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

STOPS = (signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_S = 1.0  # a terminal sends Ctrl-C to all processes and a launcher forwards it: one request


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
            if former is not None:  # else it was set in C, and Python can't put it back
                signal.signal(number, former)


class StopRequest:
    """The first signal that requested a stop; distinguishes a second request from the same one passed on."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._received_s = 0.0

    def on_signal(self, number: int) -> Literal["first", "same", "second"]:
        """Records a signal. "same": it came right after the first, from a process that passed on the same request."""
        if self.signal is None:
            self.signal, self._received_s = number, time.monotonic()
            return "first"
        return "second" if time.monotonic() - self._received_s > _SAME_REQUEST_S else "same"
