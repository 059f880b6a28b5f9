"""SIGTERM and Ctrl-C as a wish to stop, on which the ranks agree at their next meeting."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

_SAME_WISH_S = 1.0  # a terminal and a launcher may both send it


class StopWish:
    """Remembers the first signal; another one, a second or more later, raises KeyboardInterrupt at once.

    `check_peers`, given what they are needed for, raises if a peer is dead. It runs when a signal comes, too: torchrun
    sends SIGTERM to the survivors of a rank that was killed and gives them 30 s, and a microbatch may take longer.
    """

    def __init__(self, check_peers: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._heard_s = 0.0
        self._check_peers = check_peers
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopWish:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._heard)
        except ValueError:  # not the main thread: whoever has it has the signals
            pass
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal is None:
            self.signal, self._heard_s = number, now_s
        elif now_s - self._heard_s > _SAME_WISH_S:
            raise KeyboardInterrupt(f"told to stop a second time, by {signal.Signals(number).name}")
        self.look()

    def look(self) -> None:
        """After a signal, raises if a peer has died since."""
        if self.signal is not None:
            self._check_peers(f"its peers, after {signal.Signals(self.signal).name}")
