"""Stopping a run by a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable

from ...step import StepPart
from ..launcher.signals import StopRequest


class StopSignal(StepPart):
    """The first SIGTERM or Ctrl-C, as `signal`. Another one, a second or more later, raises KeyboardInterrupt at once.

    `agreed`: the signal by which all ranks stop, of the first rank that has one. `check`, given what peers are needed
    for, raises if one is dead. It also runs when a signal comes: torchrun sends SIGTERM to the survivors of a killed
    rank and gives them 30 s, and a microbatch may take longer.
    """

    def __init__(self, check: Callable[[str], None] = lambda purpose: None, request: StopRequest | None = None) -> None:
        """`request`: of all runs of this process, if there are several."""
        self._request, self._check = request or StopRequest(), check
        self.agreed: int | None = None

    @property
    def signal(self) -> int | None:
        return self._request.signal

    def on_signal(self, number: int, _: object = None) -> None:
        if self._request.on_signal(number) == "second":
            raise KeyboardInterrupt(f"stopped a second time, by {signal.Signals(number).name}")
        self.check_peers()

    def check_peers(self) -> None:
        """After a signal, raises if a peer has died since."""
        if self.signal is not None:
            self._check(f"its peers, after {signal.Signals(self.signal).name}")

    def microbatch(self) -> None:
        self.check_peers()

    def report(self) -> int | None:
        return self.signal

    def settle(self, reports: list[int | None]) -> None:
        self.agreed = next((each for each in reports if each is not None), None)
