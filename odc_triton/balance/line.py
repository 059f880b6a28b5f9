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

    `learned`: the first that predicts a target.
    """

    sample: int
    start: int
    stop: int
    parent: int | None = None
    learned: int = 0


def cut_line(
    strips: Sequence[Strip],
    shares: Sequence[float],
    cost: CostModel,
    least: int = LEAST_TOKENS,
    *,
    whole: bool = False,
) -> list[list[Entry]]:
    """By rank, its part of the line, cut in proportion to `shares`, in pieces of `least` tokens or more.

    `whole`: what is learned of a sample stays in one.
    """
    ranks, line = len(shares), math.fsum(cost.piece(each.start, each.stop, each.learned) for each in strips)
    parents = {each.parent for each in strips}
    ends = np.cumsum(shares)
    ends = (ends * (line / ends[-1])).tolist()
    parts: list[list[Entry]] = [[] for _ in range(ranks)]
    rank, begin = 0, 0.0
    for sample, start, stop, parent, learned in strips:
        at = start
        while at < stop:
            end = stop
            if rank < ranks - 1:
                place = cost.reach(start, ends[rank] - begin, learned)
                end = _nearest_cut(place, at, stop, least, learned if whole else stop)
            if (at, end) == (0, stop) and sample not in parents:
                parts[rank].append(sample)
            elif end > at:
                parts[rank].append(Piece(sample, at, end, parent if at == start else None))
            if end < stop:
                rank += 1
            at = end
        begin += cost.piece(start, stop, learned)
    return parts


def _nearest_cut(place: float, at: int, stop: int, least: int, uncut: int) -> int:
    """The cut nearest to `place` that leaves no piece under `least` tokens, neither from `at` to the cut nor after."""
    cuts, last = [at, stop], min(stop - least, uncut)
    if last >= at + least:
        cuts.append(min(max(round(place), at + least), last))
    return min(cuts, key=lambda cut: (abs(cut - place), cut))


def lay_waves(
    trees: Sequence[Sequence[Strip]],
    lengths: Sequence[int],
    *,
    ranks: int,
    token_cap: int,
    cost: CostModel,
    least: int,
    whole: bool = False,
) -> list[list[list[Entry]]] | None:
    """By wave and rank, the parts of `trees`, of which a wave takes as many as the cap allows. One that fits only in
    parts of equal tokens gets them; None if one alone does not fit.
    """
    waves = []
    while trees:
        taken, wave = len(trees), None
        while taken and wave is None:
            for by in (cost, BY_TOKENS)[: 2 if taken == 1 else 1]:
                parts = cut_line([*chain.from_iterable(trees[:taken])], [1.0] * ranks, by, least, whole=whole)
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


def shards_of(ranks: int, replicas: int, tokens: int = 0) -> int:
    """The ranks of one replica. `tokens`: that others may read. Raises ValueError if one of them is out of range."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: give the number of ranks, 1 or more")
    if replicas < 1 or ranks % replicas:
        raise ValueError(f"replicas is {replicas}: give a divisor of the {ranks} ranks")
    if tokens < 0:
        raise ValueError(f"tokens is {tokens}: give the tokens per rank that others may read, 0 or more")
    return ranks // replicas


def count_tokens(entries: Sequence[Entry], lengths: Sequence[int]) -> int:
    return sum(len(each) if isinstance(each, Piece) else lengths[each] for each in entries)


def price(
    entries: Sequence[Entry], lengths: Sequence[int], cost: CostModel, learned: Sequence[int] | None = None
) -> float:
    """The cost of entries in one microbatch, besides that of a microbatch. `learned`: by sample, as of a `Strip`."""

    def of(each: Entry) -> float:
        sample, start, stop = (
            (each.sample, each.start, each.stop) if isinstance(each, Piece) else (each, 0, lengths[each])
        )
        return cost.piece(start, stop, learned[sample] if learned else 0)

    return math.fsum(map(of, entries))
