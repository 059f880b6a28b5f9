"""A minibatch whose exact sums must be made once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from ..base.errors import MinibatchToRepeat
from .random_state import random_state, restore_random_state

_MOST_TIMES = 3
T = TypeVar("T")


class Replayable(Generic[T]):
    """An iterable that can be iterated again: it keeps its items, as a queue yields its packs only once."""

    def __init__(self, given: Iterable[T]) -> None:
        self._given, self._kept = iter(given), []

    def __iter__(self) -> Iterator[T]:
        yield from self._kept
        for each in self._given:
            self._kept.append(each)
            yield each


def repeating(run: Callable[[], T], on_repeat: Callable[[MinibatchToRepeat], None] | None = None) -> T:
    """Calls `run`, which runs one minibatch; again, at most 3 times, while it raises MinibatchToRepeat.

    Each call starts from the current random states of torch and Python.

    run: a function without arguments.
    on_repeat: is called with the error before each repetition.

    Returns what `run` returns. Raises MinibatchToRepeat if the last time raised it too.
    """
    states = random_state()
    for _ in range(_MOST_TIMES):
        try:
            return run()
        except MinibatchToRepeat as error:
            if on_repeat:
                on_repeat(error)
        restore_random_state(states)
    return run()
