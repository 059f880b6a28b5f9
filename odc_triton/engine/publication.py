"""Publication of parameters: which values of this rank and of its peers may be read."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..comm.barrier import Barrier
from ..comm.memory.heap import Status, SymmetricHeap

_POLL_S = 1e-3


class Publication:
    """This rank's count of publications, which peers wait for outside of a minibatch.

    `number`: publications so far; 0 before the first. `max_lag_s`: how long readers outside of the job may hold the
    next one back.
    """

    def __init__(self, heap: SymmetricHeap, barrier: Barrier) -> None:
        self._first, self._barrier = heap.first, barrier
        self.published = Status(heap)  # how many times the rank has published its shards
        self.stepping = Status(heap)  # one more while the rank may be writing its shards
        self.pinned = Status(heap)  # the first rank's: the last publication that such readers let pass; 0: any
        self.max_lag_s = 0.0
        self.number = 0
        self._announced = 0
        self._reading = 0  # the publication that an evaluation reads

    def _of_owners(self, status: Status) -> Iterable[tuple[int, int]]:
        """(rank, status) of the owners that this rank reads: those of its own replica."""
        return enumerate(status.seen(), self._first)

    def announce(self) -> None:
        """Announces that this rank may write its shards from here on: readers must not miss it."""
        if self._announced == self.number:
            deadline_s = time.monotonic() + self.max_lag_s
            while 0 < self.pinned.seen()[0] <= self.number and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        self._announced = self.number + 1
        self.stepping.show(self.number + 1)

    def complete(self) -> None:
        """Announces that this rank's shards are readable as they are now."""
        self.number += 1
        self.published.show(self.number)

    def agree(self, number: int) -> None:
        """Continues from a number that all ranks agreed on at a barrier, with everything published."""
        self.number = self._announced = number
        self.published.show(number)
        self.stepping.show(number)

    def wait_readable(self) -> None:
        """Waits until every owner has published as often as this rank has."""
        mine = self._reading = self.number
        self._barrier.wait_until(
            f"publication {mine} of the parameters",
            lambda: [rank for rank, count in self._of_owners(self.published) if count < mine],
        )

    def check_not_torn(self) -> None:
        """Raises if an owner may have stepped while this rank was reading outside of a minibatch."""
        ahead = [rank for rank, count in self._of_owners(self.stepping) if count > self._reading]
        if ahead:
            raise RuntimeError(
                f"ranks {ahead} stepped or published while rank {self._barrier.rank} was still reading the "
                f"parameters: evaluate after this rank's own optimizer.step(), and call publish(model) on all ranks or "
                f"on none"
            )
