"""Failures that all ranks report: work on files that all complete or none, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.errors import CheckpointCorrupt, CheckpointDiffers, CheckpointFailed, OfRanks
from ..engine.module import Engine

_SHOWN = 5  # names or differences that a message lists
_KINDS = {kind.__name__: kind for kind in (CheckpointCorrupt, CheckpointDiffers)}


def listed(words: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return "; ".join(words[:_SHOWN]) + more


class all_or_none(dict):
    """Work on files that succeeds on all ranks or fails on all.

    When the block ends, ranks exchange the contents of this dict: `.all`, by rank. If one rank raised, all raise.
    """

    all: list[dict[str, Any]]

    def __init__(self, engine: Engine, purpose: str) -> None:
        super().__init__()
        self._engine, self._purpose = engine, purpose

    def __enter__(self) -> all_or_none:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._engine.refuse_in_child(f"'{self._purpose}'")
        if isinstance(error, OfRanks):  # the others know it, or can't be asked
            return
        problem = None if error is None else problem_of(error)
        message = {"problem": problem, **(self if error is None else {})}
        if error is not None and not isinstance(error, Exception):  # a request to stop: don't wait for others
            self._engine.barrier.post(self._purpose, message)
            return
        self.all = self._engine.barrier.exchange(self._purpose, message)
        raise_together([theirs["problem"] for theirs in self.all], self._purpose, error)


def problem_of(error: BaseException) -> list[str]:
    """An error as a message to other ranks: its kind, and text."""
    return [type(error).__name__, _in_words(error)]


def raise_together(
    problems: list[list[str] | None], purpose: str, error: BaseException | None = None, *, remedy: str = ""
) -> None:
    """Raises the same error on all ranks if one of them has a problem. `problems`: by rank; `error`: this rank's."""
    found = {rank: problem for rank, problem in enumerate(problems) if problem is not None}
    if not found:
        return
    kinds = {kind for kind, _ in found.values()}
    text = "; ".join(f"rank {rank}: {words}" for rank, (_, words) in found.items())
    if len(kinds) == 1 and (same := _KINDS.get(kinds.pop())) is not None:
        unique = list(dict.fromkeys(words for _, words in found.values()))
        raise same("; ".join(unique)) from error
    raise CheckpointFailed(list(found), f"could not {purpose} ({text}){remedy}") from error


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}" if type(error).__name__ not in _KINDS else str(error)
