"""Which units' whole parameters are filled now, and which one is fetched ahead."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .order import StepOrder

if TYPE_CHECKING:
    from .unit import Unit


class Prefetch:
    """Fills a unit that is needed, and begins to fill the one that came after it in the last microbatch.

    `lock` is of which units are whole: evaluations may run in several threads.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._order: StepOrder[tuple[bool, Unit]] = StepOrder()
        self._ahead: Unit | None = None  # fetched, though nobody needs it yet

    def needs(self, unit: Unit, *, in_backward: bool) -> None:
        """What is computed from here on finds the whole tensors of `unit` filled."""
        with self.lock:
            unit.fetch()
            if self._ahead is unit:
                self._ahead = None
            self._let_go_ahead()
            following = self._order.begin((in_backward, unit))
            unit.wait()
            if following is not None and not following[1].is_fetched:
                self._ahead = following[1]
                self._ahead.fetch()

    def _let_go_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.let_go()

    def expect_nothing(self) -> None:
        """A microbatch is over: what comes next does not follow its last unit."""
        with self.lock:
            self._let_go_ahead()
            self._order.end()
