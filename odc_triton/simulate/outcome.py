"""What a simulation says."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..base.events import Event


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one setting over several minibatches (trials). Seconds; arrays (trials,) or (trials, ranks).

    Of a rank's minibatch `seconds` = `busy_s` (computing) + `exposed_s` (its compute waits while its own bytes move)
    + `waited_s` (for other ranks: at meetings, in collectives, at the end) + `tail_s` (the optimizer step, publishing,
    and what crosses the nodes at the end: the same on every rank).
    """

    schedule: str
    balance: str
    seconds: np.ndarray
    busy_s: np.ndarray
    exposed_s: np.ndarray
    waited_s: np.ndarray
    tail_s: float
    microbatches: list[list[int]]
    """Per trial, of each rank."""
    peak_bytes: int | None
    """Of the fullest rank, activations of its largest microbatch included; None where the model is not given."""
    events: list[Event] = field(default_factory=list)
    """The first trial's timeline, where it was asked for, in the form of the engine's."""

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
