"""When a run saves a checkpoint by the clock: so often that a killed run loses a given time of training at most."""

from __future__ import annotations

import time

from ...step import StepPart

_UNKNOWN_COST = 0.1  # of the interval: what the first checkpoint is expected to take


class SaveClock(StepPart):
    """`is_due` after a step's barrier: rank 0's clock decides, for all ranks alike.

    A process that is killed while it saves has lost what came since the last whole checkpoint. So one is due when
    another step, and the time to save, would make that more than `interval_s`. 0: never.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._cost_s = _UNKNOWN_COST * interval_s
        self._saved_s = self._reported_s = time.monotonic()  # of what the last checkpoint has; of the last report
        self._longest_s = 0.0  # step since then
        self._is_whole = True
        self.ahead_s = 0.0  # of other work before the next step ends
        self.is_due = False

    def report(self) -> bool:
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - self._reported_s)
        self._reported_s = now_s
        at_next_s = now_s - self._saved_s + self.ahead_s + self._longest_s + self._cost_s
        return 0 < self._interval_s <= at_next_s

    def settle(self, reports: list[bool]) -> None:
        self.is_due = reports[0]

    def begin(self) -> None:
        """Saving begins."""
        self._saved_s = time.monotonic()
        self._longest_s, self._is_whole, self.is_due = 0.0, False, False

    def end(self) -> None:
        """What was saved last is whole."""
        if not self._is_whole:
            self._is_whole, self._cost_s = True, time.monotonic() - self._saved_s

    def restart(self) -> None:
        """What has passed since the last report was no step."""
        self._reported_s = time.monotonic()
