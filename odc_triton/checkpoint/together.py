"""A piece of work on files that all ranks do together: it succeeds on all of them or fails on all of them alike."""

from __future__ import annotations

from typing import Any

from ..base.errors import CheckpointCorrupt, CheckpointDiffers, CheckpointFailed
from ..engine.engine import Engine

_KINDS = {kind.__name__: kind for kind in (CheckpointCorrupt, CheckpointDiffers)}


class together(dict):
    """What a `with` block puts in goes to all ranks when it ends: `.all`, by rank. If one raised, all do."""

    all: list[dict[str, Any]]

    def __init__(self, engine: Engine, purpose: str) -> None:
        super().__init__()
        self._engine, self._purpose = engine, purpose

    def __enter__(self) -> together:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        problem = None if error is None else [type(error).__name__, _words(error)]
        message = {"problem": problem, **(self if error is None else {})}
        if error is not None and not isinstance(error, Exception):  # a wish to stop: nobody is waited for
            self._engine.meetings.tell(self._purpose, message)
            return
        self.all = self._engine.meetings.meet(self._purpose, message)
        problems = {rank: theirs["problem"] for rank, theirs in enumerate(self.all) if theirs["problem"] is not None}
        if not problems:
            return
        kinds = {kind for kind, _ in problems.values()}
        text = "; ".join(f"rank {rank}: {words}" for rank, (_, words) in problems.items())
        if len(kinds) == 1 and (same := _KINDS.get(kinds.pop())) is not None:
            unique = list(dict.fromkeys(words for _, words in problems.values()))
            raise same("; ".join(unique)) from error
        raise CheckpointFailed(list(problems), f"could not {self._purpose} ({text})") from error


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}" if type(error).__name__ not in _KINDS else str(error)
