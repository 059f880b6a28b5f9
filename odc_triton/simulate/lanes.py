"""The clocks of ranks that go through the units of a model: compute, reads of parameters, adds of gradients.

Every rank has three streams. Unit k, with its read, its work and its add, keeps these rules (all of them are maxima of
earlier ends, so a pass over the units in order is the whole discrete-event simulation):

    a read starts when the read before it has ended, and when unit k - 2 is over (two buffers: the one in use and the
        next); without `prefetch`, when unit k - 1 is over
    work starts when the work before it and its own read have ended
    an add starts when its work and the add before it have ended; the work behind it waits for the add before it (one
        gradient buffer in flight); without `overlap`, for the add itself
    a collective read or add starts on all ranks when the last one is ready

With reads and adds of no time and neither prefetch nor overlap, collectives give the paper's sum over units of
max over ranks, and their absence the max over ranks of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Clock = Any  # seconds: an array (trials, ranks), or a float, of one rank
Meet = Callable[[Clock], Clock]
Record = Callable[[str, Clock, Clock, str], None]


def last_rank(ready: np.ndarray) -> np.ndarray:
    """When the last rank of each trial is ready. (trials, ranks) -> (trials, 1), seconds."""
    return ready.max(axis=-1, keepdims=True)


class Lanes:
    """Clocks in seconds since the minibatch's entry, of all ranks of several trials, or (floats) of one rank.

    `busy`, `exposed` and `waited`: seconds of work, of transfers that work waited for, of waiting for other ranks.
    """

    def __init__(self, zero: Clock, *, prefetch: bool, overlap: bool, sm_share: float, record: Record | None) -> None:
        self.compute = self.read = self.add = self.before = zero
        self.busy = self.exposed = self.waited = self._last_add_s = zero
        self._prefetch, self._overlap, self._sm_share, self._record = prefetch, overlap, sm_share, record
        self._larger, self._smaller = (max, min) if isinstance(zero, float) else (np.maximum, np.minimum)

    def unit(
        self,
        work_s: Clock,
        kind: str,
        *,
        read_s: Clock | None = None,
        add_s: Clock | None = None,
        meet: Meet | None = None,
    ) -> None:
        """One unit's forward or backward. `meet` makes its read and its add collectives."""
        came = start = self.compute
        if read_s is not None:
            ready = self._larger(self.read, self.before if self._prefetch else came)
            self.read = (meet(ready) if meet else ready) + read_s
            start = self._larger(came, self.read)
            self._waits(came, start, read_s, "all-gather" if meet else "gather")
        if self._sm_share:
            work_s = self._beside_transfers(
                work_s, (0.0 if read_s is None else read_s) + (0.0 if add_s is None else add_s)
            )
        end = start + work_s
        self.busy = self.busy + work_s
        if self._record:
            self._record(kind, start, end, "")
        if add_s is not None:
            label = "reduce-scatter" if meet else "scatter"
            free = self._larger(end, self.add)
            self._waits(end, free, self._last_add_s, label)
            self.add = (meet(free) if meet else free) + add_s
            self._last_add_s = add_s
            end = free
            if not self._overlap:
                self._waits(end, self.add, add_s, label)
                end = self.add
        self.before, self.compute = came, end

    def drain(self) -> None:
        """Waits for the last add."""
        end = self._larger(self.compute, self.add)
        self._waits(self.compute, end, self._last_add_s, "scatter at the end")
        self.compute = end

    def _beside_transfers(self, work_s: Clock, transfers_s: Clock) -> Clock:
        """Work that shares its SMs with transfers as long as these last."""
        return work_s + self._sm_share * self._smaller(transfers_s, work_s / (1 - self._sm_share))

    def _waits(self, start: Clock, end: Clock, transfer_s: Clock, label: str) -> None:
        wait = end - start
        exposed = self._smaller(wait, transfer_s)
        self.exposed = self.exposed + exposed
        self.waited = self.waited + (wait - exposed)
        if self._record:
            self._record("wait", start, end, label)
