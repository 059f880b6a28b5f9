"""From measured seconds to choices. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

# A candidate must beat the shipped choice by so much in the median, and in so many of the rounds, each of which took
# both: less is noise, and a table that follows noise changes with every measurement.
MARGIN = 0.03
ROUNDS_WON = 0.75

Rounds = Mapping[str, Sequence[float]]
"""Seconds of each candidate, by its words, round by round."""


def decide(seconds: Mapping[int, Rounds], shipped: Mapping[int, str], *, one_backend: bool = False) -> dict[int, str]:
    """For each number of tokens the fastest candidate; the shipped one where none is clearly faster.

    seconds: by tokens, of candidates that gave the right result. A shipped choice that is missing there (it did not
    run) loses. one_backend: kernels run it for any number of tokens or for none (see `choice.is_by_kernel`); the
    backend is then the one whose best candidates take least over all numbers of tokens.

    Raises ValueError for a number of tokens for which nothing ran.
    """
    for tokens, of in seconds.items():
        if not of:
            raise ValueError(f"no way to run it with {tokens} tokens gave a result")
    if one_backend:
        kept = _best_backend(seconds, next(iter(shipped.values())).split("/")[0])
        seconds = {
            tokens: {words: rounds for words, rounds in of.items() if words.split("/")[0] == kept}
            for tokens, of in seconds.items()
        }
    return {tokens: _fastest(of, shipped[tokens]) for tokens, of in seconds.items()}


def _fastest(of: Rounds, shipped: str) -> str:
    best = min(of, key=lambda words: statistics.median(of[words]))
    return best if shipped not in of or _is_clear(of[best], of[shipped]) else shipped


def _is_clear(new: Sequence[float], old: Sequence[float]) -> bool:
    won = sum(n < o for n, o in zip(new, old, strict=True)) / len(new)
    return won >= ROUNDS_WON and statistics.median(new) <= statistics.median(old) * (1 - MARGIN)


def _best_backend(seconds: Mapping[int, Rounds], shipped: str) -> str:
    everywhere = set.intersection(*({words.split("/")[0] for words in of} for of in seconds.values()))
    if not everywhere:
        raise ValueError("no backend gave a result for every number of tokens")
    total: dict[str, list[float]] = {}
    for backend in sorted(everywhere):
        best = [
            min((r for words, r in of.items() if words.split("/")[0] == backend), key=statistics.median)
            for of in seconds.values()
        ]
        total[backend] = [sum(rounds) for rounds in zip(*best, strict=True)]
    return _fastest(total, shipped)
