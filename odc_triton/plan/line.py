"""A line of cost: the tokens that each sample computes, laid end to end and cut into one part per rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .entries import Entry, Segment, number_of

LEAST_TOKENS = 64  # of a segment: fewer cost more to wait for than to compute
_ROUNDS = 4  # of cuts, each by what the pairs of the one before cost
_BY_TOKENS = CostModel(quadratic=0.0, linear=1.0)


class Strip(NamedTuple):
    """Tokens `start` up to, not including, `stop` of a sample; it branches from `parent` at `start`, if that is not 0.

    `learned`: the first that predicts a target. `floor`: its first tokens, those up to its last image's, that are not
    cut. `extra`: what its images cost in addition to tokens; the sample's first segment has all of it.
    """

    sample: int
    start: int
    stop: int
    parent: int | None = None
    learned: int = 0
    floor: int = 0
    extra: float = 0.0

    def price(self, cost: CostModel, start: int = 0, stop: int | None = None) -> float:
        """The cost of its sample's tokens `start` to `stop`; by default of all."""
        return cost.segment(start, self.stop if stop is None else stop, self.learned) + self.extra * (start == 0)

    def reach(self, cost: CostModel, price: float) -> float:
        """The token up to which it costs `price`; in proportion where it is not cut."""
        if self.start == 0:
            uncut = self.price(cost, 0, self.floor)
            if self.floor and price < uncut:
                return self.floor * price / uncut
            price -= self.extra
        return cost.reach(self.start, price, self.learned)


def cut_line(
    strips: Sequence[Strip],
    shares: Sequence[float],
    cost: CostModel | None,
    least: int = LEAST_TOKENS,
    *,
    whole: bool = False,
) -> list[list[Entry]]:
    """By rank, its part of the line, cut in proportion to `shares`, in segments of `least` tokens or more.

    `cost`: None for a line of tokens. `whole`: what is learned of a sample stays in one. Parts that make pairs (see
    `CostModel`) get less of the line: how much less depends on the cut, so it is found in a few rounds.
    """
    if cost is None:
        cost, strips = _BY_TOKENS, [each._replace(extra=0.0) for each in strips]
    parts = _cut(strips, shares, cost, least, whole)
    if not cost.pair:
        return parts
    by_sample, without = {each.sample: each for each in strips}, replace(cost, pair=0.0)
    line, found = math.fsum(each.price(cost, each.start) for each in strips), []
    left, step = [each * line / math.fsum(shares) for each in shares], cost.linear / cost.between.linear
    for _ in range(_ROUNDS):
        prices = [price(part, by_sample, cost) for part in parts]
        pairs = [each - price(part, by_sample, without) for each, part in zip(prices, parts, strict=True)]
        found.append((max(each - much for each, much in zip(prices, shares, strict=True)), parts))
        whole_line = (line + math.fsum(pairs)) / math.fsum(shares)
        wanted = [max(much * whole_line - more, 0.0) for much, more in zip(shares, pairs, strict=True)]
        left = [have + step * (want - have) for have, want in zip(left, wanted, strict=True)]
        parts = _cut(strips, left, cost, least, whole)
    return min(found, key=lambda each: each[0])[1]


def _cut(
    strips: Sequence[Strip], shares: Sequence[float], cost: CostModel, least: int, whole: bool
) -> list[list[Entry]]:
    ranks, line = len(shares), math.fsum(each.price(cost, each.start) for each in strips)
    parents = {each.parent for each in strips}
    ends = np.cumsum(shares)
    ends = (ends * (line / ends[-1])).tolist()
    parts: list[list[Entry]] = [[] for _ in range(ranks)]
    rank, begin = 0, 0.0
    for strip in strips:
        sample, start, stop, parent = strip[:4]
        at = start
        while at < stop:
            end = stop
            if rank < ranks - 1:
                place = strip.reach(cost, ends[rank] - begin)
                last = min(max(stop - least, strip.floor), strip.learned if whole else stop)
                end = _nearest_cut(place, at, stop, max(at + least, strip.floor), last)
            if (at, end) == (0, stop) and sample not in parents:
                parts[rank].append(sample)
            elif end > at:
                parts[rank].append(Segment(sample, at, end, parent if at == start else None))
            if end < stop:
                rank += 1
            at = end
        begin += strip.price(cost, start)
    return parts


def _nearest_cut(place: float, at: int, stop: int, first: int, last: int) -> int:
    """The cut nearest to `place` of those from `first` to `last`, and of `at` and `stop`, which leave all in one."""
    cuts = [at, stop]
    if last >= first:
        cuts.append(min(max(round(place), first), last))
    return min(cuts, key=lambda cut: (abs(cut - place), cut))


def zigzag(strip: Strip, ranks: int, least: int) -> list[list[Entry]] | None:
    """A sample in twice as many parts of equal tokens, of which a rank has one from the first and one from the last, so
    that all ranks' cost the same. None if a part would have less than `least` tokens, or its images don't fit one.
    """
    if strip.start or strip.stop < 2 * ranks * least or strip.floor * 2 * ranks > strip.stop:
        return None
    cuts = [strip.stop * at // (2 * ranks) for at in range(2 * ranks + 1)]
    cuts.pop(ranks)  # the last rank's are adjacent
    parts: list[list[Entry]] = [[Segment(strip.sample, *bounds)] for bounds in pairwise(cuts)]
    outer = zip(parts[: ranks - 1], parts[: ranks - 1 : -1], strict=True)
    return [*(first + last for first, last in outer), parts[ranks - 1]]


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
    parts of equal tokens gets them, a sample alone as a zigzag where that fits; None if one alone does not fit.
    """
    waves = []
    while trees:
        taken, wave = len(trees), None
        while taken and wave is None:
            strips = [*chain.from_iterable(trees[:taken])]
            for parts in _cuts(strips, ranks, cost, least, whole, by_tokens=taken == 1):
                most = max(count_tokens(part, lengths) for part in parts)
                if most <= token_cap:
                    wave = parts
                    break
            else:
                # A part has about as many tokens of each tree, so this is near the most that fit.
                taken = min(taken - 1, max(1, taken * token_cap // most))
        if wave is None:
            return None
        waves.append(wave)
        trees = trees[taken:]
    return waves


def _cuts(
    strips: Sequence[Strip], ranks: int, cost: CostModel, least: int, whole: bool, *, by_tokens: bool
) -> Iterator[list[list[Entry]]]:
    yield cut_line(strips, [1.0] * ranks, cost, least, whole=whole)
    if cost.pair:  # of more even tokens
        yield cut_line(strips, [1.0] * ranks, replace(cost, pair=0.0), least, whole=whole)
    if by_tokens:
        if len(strips) == 1 and (parts := zigzag(strips[0], ranks, least)):
            yield parts
        yield cut_line(strips, [1.0] * ranks, None, least, whole=whole)


def count_tokens(entries: Sequence[Entry], lengths: Sequence[int]) -> int:
    return sum(len(each) if isinstance(each, Segment) else lengths[each] for each in entries)


def price(entries: Sequence[Entry], strips: Sequence[Strip] | Mapping[int, Strip], cost: CostModel) -> float:
    """The cost of entries in one microbatch, without the microbatch's. `strips`: by sample."""

    own = {number_of(each) for each in entries} if cost.pair else ()

    def of(each: Entry) -> float:
        strip = strips[number_of(each)]
        if not isinstance(each, Segment):
            return strip.price(cost)
        pairs = cost.pair and each.start and each.stop < strip.stop and each.parent not in own
        return strip.price(cost.between if pairs else cost, each.start, each.stop)

    return math.fsum(map(of, entries))
