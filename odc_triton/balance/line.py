"""A line of cost: samples laid end to end, of each the tokens that it computes, cut into one part per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .pieces import Entry, Piece

LEAST_TOKENS = 64  # of a piece: fewer cost more to wait for than to compute
BY_TOKENS = CostModel(quadratic=0.0, linear=1.0)


class Strip(NamedTuple):
    """Tokens `start` up to, not including, `stop` of a sample; it branches off `parent` at `start`, if that is not 0.

    `uncut`: from this token on they stay in one piece.
    """

    sample: int
    start: int
    stop: int
    parent: int | None = None
    uncut: int | None = None


def cut_line(
    strips: Sequence[Strip], shares: Sequence[float], cost: CostModel, least: int = LEAST_TOKENS
) -> list[list[Entry]]:
    """By rank, its part of the line, cut in proportion to `shares`, in pieces of `least` tokens or more."""
    ranks, line = len(shares), math.fsum(cost.piece(each.start, each.stop) for each in strips)
    parents = {each.parent for each in strips}
    ends = np.cumsum(shares)
    ends = (ends * (line / ends[-1])).tolist()
    parts: list[list[Entry]] = [[] for _ in range(ranks)]
    rank, begin = 0, 0.0
    for sample, start, stop, parent, uncut in strips:
        before, at = cost.sequence(start), start
        while at < stop:
            end = stop
            if rank < ranks - 1:
                place = cost.tokens(ends[rank] - begin + before)
                end = _nearest_cut(place, at, stop, least, stop if uncut is None else uncut)
            if (at, end) == (0, stop) and sample not in parents:
                parts[rank].append(sample)
            elif end > at:
                parts[rank].append(Piece(sample, at, end, parent if at == start else None))
            if end < stop:
                rank += 1
            at = end
        begin += cost.piece(start, stop)
    return parts


def _nearest_cut(place: float, at: int, stop: int, least: int, uncut: int) -> int:
    """The cut nearest to `place` that leaves no piece under `least` tokens, neither from `at` to the cut nor after."""
    cuts, last = [at, stop], min(stop - least, uncut)
    if last >= at + least:
        cuts.append(min(max(round(place), at + least), last))
    return min(cuts, key=lambda cut: (abs(cut - place), cut))


def lay_waves(
    trees: Sequence[Sequence[Strip]], lengths: Sequence[int], *, ranks: int, token_cap: int, cost: CostModel, least: int
) -> list[list[list[Entry]]] | None:
    """By wave and rank, the parts of `trees`, of which a wave takes as many as the cap allows. One that fits only in
    parts of equal tokens gets them; None if one alone does not fit.
    """
    waves = []
    while trees:
        taken, wave = len(trees), None
        while taken and wave is None:
            for by in (cost, BY_TOKENS)[: 2 if taken == 1 else 1]:
                parts = cut_line([*chain.from_iterable(trees[:taken])], [1.0] * ranks, by, least)
                most = max(count_tokens(part, lengths) for part in parts)
                if wave is None and most <= token_cap:
                    wave = parts
            # A part has about as many tokens of each tree, so this is near the most that fit.
            taken = taken if wave is not None else min(taken - 1, max(1, taken * token_cap // most))
        if wave is None:
            return None
        waves.append(wave)
        trees = trees[taken:]
    return waves


def count_tokens(entries: Sequence[Entry], lengths: Sequence[int]) -> int:
    return sum(len(each) if isinstance(each, Piece) else lengths[each] for each in entries)


def price(entries: Sequence[Entry], lengths: Sequence[int], cost: CostModel) -> float:
    """The cost of entries in one microbatch, besides that of a microbatch."""
    return math.fsum(
        cost.piece(each.start, each.stop) if isinstance(each, Piece) else cost.sequence(lengths[each])
        for each in entries
    )
