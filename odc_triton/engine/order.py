"""Which unit is needed next: learnt from the order of the last microbatch. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Step = TypeVar("Step", bound=Hashable)


class StepOrder(Generic[Step]):
    """Tells, as each step begins, which step followed it last time. A wrong guess costs time, not correctness."""

    def __init__(self) -> None:
        self._followed_by: dict[Step, Step] = {}
        self._last: Step | None = None

    def begin(self, step: Step) -> Step | None:
        """Notes that `step` begins now; returns the step that came after it before, None when it is not known."""
        if self._last is not None and self._last != step:
            self._followed_by[self._last] = step
        self._last = step
        return self._followed_by.get(step)

    def end(self) -> None:
        """The steps so far were one microbatch's: what comes next does not follow them."""
        self._last = None
