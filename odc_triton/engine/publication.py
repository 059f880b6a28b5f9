"""Which values of the parameters may be read: what this rank has published, and what its peers have."""

from __future__ import annotations

from collections.abc import Iterable

from ..comm.meeting import Meetings
from ..comm.memory.heap import SymmetricHeap, Word


class Publication:
    """This rank's count of publications, shown to its peers, who wait for each other's outside of a minibatch.

    `number`: how many there were; 0 before the first.
    """

    def __init__(self, heap: SymmetricHeap, meetings: Meetings) -> None:
        self._heap, self._meetings = heap, meetings
        self.number = 0
        self._reading = 0  # the one that an evaluation reads

    def _seen(self, word: Word) -> Iterable[tuple[int, int]]:
        """That word of the owners that this rank reads: those of its own replica."""
        return enumerate(self._heap.seen(word), self._heap.first)

    def announce(self) -> None:
        """Says that this rank may be writing its shards from here on: a reader must not miss it."""
        self._heap.show(Word.STEPPING, self.number + 1)

    def complete(self) -> None:
        """Says that this rank's shards are readable as they are now."""
        self.number += 1
        self._heap.show(Word.PUBLISHED, self.number)

    def agree(self, number: int) -> None:
        """Goes on from a number that all ranks have met at, with everything published."""
        self.number = number
        self._heap.show(Word.PUBLISHED, number)
        self._heap.show(Word.STEPPING, number)

    def wait_readable(self) -> None:
        """Waits until every owner has published as often as this rank has."""
        mine = self._reading = self.number
        self._meetings.wait_until(
            f"publication {mine} of the parameters",
            lambda: [rank for rank, count in self._seen(Word.PUBLISHED) if count < mine],
        )

    def check_not_torn(self) -> None:
        """Raises if an owner may have stepped while this rank read outside of a minibatch."""
        ahead = [rank for rank, count in self._seen(Word.STEPPING) if count > self._reading]
        if ahead:
            raise RuntimeError(
                f"ranks {ahead} stepped or published while rank {self._meetings.rank} was still reading the "
                f"parameters: evaluate after this rank's own optimizer.step(), and call publish(model) on all ranks or "
                f"on none"
            )
