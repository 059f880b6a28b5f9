"""LB-Split: the longest sequences of a minibatch are split over all ranks, the others assigned as by LB-Mini.

With one or two samples a rank the longest sequence determines the step's time in any assignment. Split evenly, it costs
every rank the same, and the remaining samples are small.

[Note: line rule] The k longest sequences are laid end to end on a line of cost, which is cut into one part per rank. A
part may hold the end of one sequence and the beginning of the next. If the unsplit samples fit the same microbatches,
the parts make up for them: a rank with many gets a small part, or none. Keys and values of earlier segments cross
links, so k should be small, and the longest sequences are laid first or last, whichever lets others read fewer tokens;
if those are too many, a few sequences are each cut over all ranks. Several k are tried. The least estimate wins if it
is 5% better than LB-Mini: smaller gains are noise, in measured runs such plans gained nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, zip_longest

import numpy as np

from .cost import CostModel
from .entries import Entry, Segment, named
from .line import LEAST_TOKENS, Strip, count_tokens, cut_line, lay_waves, price, zigzag
from .partition import BALANCED, balanced_partition, longest_first
from .plan import Plan
from .samples import Limits, Samples
from .segments import SplitPlan

Waves = list[list[list[Entry]]]  # by wave and rank

_LEAST_GAIN = 0.05
_TRIED, _MANY = 4, 64  # numbers of split sequences that are tried in full; half of them for many ranks
_FANNED = 4  # sequences, at most, each of which may be cut over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAssignment:
    """Samples by their places. `waves`: by wave and rank, a microbatch of the line, maybe empty; `waves_cost`: of all
    of them, on each rank. `whole`: by rank, the samples outside of waves. `estimate`: the step's cost.
    """

    waves: Waves
    waves_cost: float
    whole: list[list[int]]
    estimate: float

    def among(self, places: Sequence[int]) -> SplitAssignment:
        """The same, of some samples, with their places among all."""
        waves = [[[named(each, places) for each in part] for part in wave] for wave in self.waves]
        return replace(self, waves=waves, whole=[[places[at] for at in own] for own in self.whole])


def split_plan(samples: Samples, limits: Limits, *, ride: bool = True) -> Plan:
    """Assigns samples, the costliest in segments. One may be longer than the token cap, as long as its segments fit.

    `ride`: unsplit samples may share the wave's microbatches if all fit; not for the work queue, as such samples are
    fixed, and the plan has each rank's waves alone. Deterministic: every rank gets the same result.

    Raises ValueError for a sample that is over the cap and can't be split, with the remedy.
    """
    problem = _Problem(samples, limits, ride)
    best = problem.best() if limits.replicas == 1 else _over_replicas(problem)
    waves = [[[named(each, samples.names) for each in part] for part in wave] for wave in best.waves]
    by_rank = [*zip(*waves, strict=True)] or [()] * limits.ranks
    return Plan(
        samples=samples,
        token_cap=limits.token_cap,
        ready=by_rank,
        ready_cost=best.waves_cost,
        unpacked=best.whole,
        estimate=best.estimate,
        split=SplitPlan.of(by_rank, replicas=limits.replicas),
    )


def _unsplit(samples: Samples) -> list[Strip]:
    cuts, extra = ([0] * len(samples) if each is None else each for each in (samples.earliest_cuts, samples.extra))
    rows = enumerate(zip(samples.tokens, cuts, extra, strict=True))
    return [Strip(at, 0, length, floor=int(cut), extra=each) for at, (length, cut, each) in rows]


def _over_replicas(problem: _Problem) -> SplitAssignment:
    """The better of unsplit samples over all ranks, and of samples assigned to replicas by cost and split there."""
    replicas, whole = problem.limits.replicas, None
    least = max(problem.costs[0], problem.even_share)  # of unsplit samples
    if not problem.over and problem.even_share > least * (1 - _LEAST_GAIN):
        whole = problem.assign(0, [])
        if problem.even_share > whole.estimate * (1 - _LEAST_GAIN):
            return whole
    try:
        parts = _parts(problem, balanced_partition(problem.costs, replicas))
    except ValueError:  # a replica can't split all of its samples over the cap, which are the longest
        by_length = [problem.cost.sequence(problem.lengths[i]) for i in problem.order]
        parts = _parts(problem, longest_first(by_length, replicas, equal=problem.over))
    joined = _joined(parts)
    if problem.over or joined.estimate <= least * (1 - _LEAST_GAIN):
        return joined
    whole = whole or problem.assign(0, [])
    return joined if joined.estimate <= whole.estimate * (1 - _LEAST_GAIN) else whole


def _parts(problem: _Problem, dealt: list[list[int]]) -> list[SplitAssignment]:
    """Each replica's best assignment of its samples, given by their places in `problem.order`."""
    groups = [[problem.order[place] for place in sorted(places)] for places in dealt]
    return [problem.part(members).best().among(members) for members in groups]


def _joined(parts: Sequence[SplitAssignment]) -> SplitAssignment:
    """The replicas' assignments as one. Their waves of the same number have nothing to do with each other."""
    nothing: list[list[Entry]] = [[] for _ in parts[0].whole]
    rows = zip_longest(*(part.waves for part in parts), fillvalue=nothing)
    return replace(
        parts[0],
        waves=[[*chain.from_iterable(row)] for row in rows],
        waves_cost=max(part.waves_cost for part in parts),
        whole=[own for part in parts for own in part.whole],
        estimate=max(part.estimate for part in parts),
    )


def readable_tokens(
    lengths: Sequence[int],
    *,
    ranks: int,
    samples: int,
    token_cap: int,
    cost: CostModel,
    replicas: int = 1,
    floors: Sequence[int] | None = None,
) -> int:
    """A good `split_tokens` of `Limits`, and `tokens` for `enable_split`, for minibatches of `samples`.

    0.4 of the longest sample gives nearly all of the gain; on few ranks it is the first part of that sample, cut
    evenly. Samples over the cap must be split: with this number a plan never raises for up to `samples` of
    `lengths`, at any `cost`, unless `floors` (see there) leave no cut. A quarter of that part is more than segments of
    equal tokens need; without it minibatches nearly all over the cap were up to 28% slower.
    """
    longest, ranks, samples = max(lengths), ranks // replicas, -(-samples // replicas)
    first_part = cost.reach(0, cost.between.sequence(longest) / ranks) + LEAST_TOKENS
    # A read segment of equal tokens is at most half of the least segment longer than planned: see _nearest_cut.
    least = math.ceil(1.5 * _least_tokens(token_cap))
    rows = zip(lengths, [0] * len(lengths) if floors is None else floors, strict=True)
    over = (max(math.ceil(length / ranks), least, floor) for length, floor in rows if length > token_cap)
    even = sorted(over, reverse=True)[:samples]
    return math.ceil(max(min(longest, max(0.4 * longest, first_part)), 1.25 * sum(even)))


def _least_tokens(token_cap: int) -> int:
    """The least tokens of a segment, small enough that a sample over the cap can be split."""
    return max(1, min(LEAST_TOKENS, token_cap // 2))


@dataclass
class _Problem:
    """The samples of one minibatch, and the limits. `order`: those over the cap, then the others, costliest first, as
    `costs`.
    """

    samples: Samples
    limits: Limits
    ride: bool

    def __post_init__(self) -> None:
        self.ranks, self.token_cap, self.cost = self.limits.ranks, self.limits.token_cap, self.samples.cost
        self.strips, self.lengths, prices = _unsplit(self.samples), self.samples.tokens, self.samples.prices
        self.least_tokens = _least_tokens(self.token_cap)
        self.order = sorted(range(len(prices)), key=lambda i: (self.lengths[i] <= self.token_cap, -prices[i]))
        self.costs = [prices[i] for i in self.order]
        self.even_share = math.fsum(self.costs) / self.ranks
        self.over = sum(length > self.token_cap for length in self.lengths)
        self.even = [1.0] * self.ranks
        self.may_ride = self.ride and sum(self.lengths) <= self.ranks * self.token_cap

    def part(self, members: Sequence[int]) -> _Problem:
        """That of one replica, which has these samples."""
        return _Problem(self.samples.some(members), self.limits.of_replica(), self.ride)

    def best(self) -> SplitAssignment:
        """Raises ValueError if the samples over the cap can't be split."""
        over = self.over
        best = self.assign(0, []) if over == 0 else None
        to_beat = math.inf if best is None else best.estimate * (1 - _LEAST_GAIN)
        if self.lengths and self.even_share <= to_beat:
            for count, waves in self.worth_trying():
                assignment = self.assign(count, waves)
                if assignment.estimate <= to_beat:
                    best, to_beat = assignment, assignment.estimate * (1 - 1e-9)  # of equal ones, the fewest split
                    if to_beat <= self.even_share * (1 + BALANCED):
                        break
        if best is not None:
            return best
        strips = [self.strips[sample] for sample in self.order[:over]]  # each a wave, in equal parts, if images allow
        waves = [cut_line([each], self.even, None, self.least_tokens) for each in strips]
        most = [max(count_tokens(part, self.lengths) for part in wave) for wave in waves]
        if (cuts := self._most(waves, bool)) > self.limits.cuts:
            raise ValueError(
                f"{over} samples over the token_cap of {self.token_cap} are cut at {cuts} places of a rank, and "
                f"split_cuts is {self.limits.cuts}: give --split-cuts, or split_cuts and enable_split(cuts=…), {cuts} "
                f"or more, or a larger token_cap"
            )
        if (needed := self.most_read(waves)) > self.limits.split_tokens or max(most) > self.token_cap:
            sample = strips[most.index(max(most)) if max(most) > self.token_cap else 0]
            raise ValueError(
                f"sample {self.samples.names[sample.sample]} has {sample.stop} tokens, over the token_cap of "
                f"{self.token_cap}, and others may read {self.limits.split_tokens} tokens of each rank, but this "
                f"minibatch's segments need {needed}: raise the cap or the tokens to read, or truncate or drop the "
                f"sample"
                + f"; the tokens of its images, within the first {sample.floor}, can't be cut"
                * bool(sample.floor)
            )
        return self.assign(over, waves)

    def worth_trying(self) -> Iterator[tuple[int, Waves]]:
        """Numbers of sequences to split, fewest first, with their waves: those whose lower bound is near the least.

        Lower bounds of the step are an even part of the line plus the costliest remaining sample, and an even share.
        Those whose segments exceed the limits are left out. First comes the fewest that is enough for a line that makes
        up for the others: none of them costs more than an even share. It is nearly always even, and has the fewest
        tokens to read.
        """
        rest = np.append(self.costs[1:], 0.0)
        bound = np.maximum(np.cumsum(self.costs) / self.ranks + rest, self.even_share)
        fewest = max(self.over, 1)
        if self.may_ride:
            count = fewest + int(np.argmax(rest[fewest - 1 :] <= self.even_share))
            if waves := self._lay(self.order[:count]):
                yield count, waves
        best = fewest + int(np.argmax(bound[fewest - 1 :] <= bound[fewest - 1 :].min() * 1.01))
        found: list[tuple[int, Waves]] = []
        tried = _TRIED if self.ranks <= _MANY else _TRIED // 2
        low, high = fewest, min(best + tried // 2, len(bound))
        while low <= high and len(found) < tried:  # from `best` down to those that fit
            count = high
            high = count - 1
            if waves := self._lay(self.order[:count]):
                found.append((count, waves))
            else:
                high = min(high, max(low, count - count // 8))
        yield from reversed(found)

    def _lay(self, samples: list[int]) -> Waves | None:
        """Waves of the samples, laid longest first or last on the line, whichever lets others read fewer tokens, or
        fanned out; None if they exceed the limits.
        """
        limits = {"ranks": self.ranks, "token_cap": self.token_cap, "cost": self.cost, "least": self.least_tokens}
        orders = ([[self.strips[sample]] for sample in order] for order in (samples, samples[::-1])[: len(samples)])
        found = (lay_waves(trees, self.lengths, **limits) for trees in orders)
        waves = min(filter(None, found), key=self.most_read, default=None)
        if waves and self._readable(waves):
            return waves
        return [fan] if len(samples) <= _FANNED and self._fit(fan := self._fan(samples, self.even)) else None

    def _line(self, samples: Sequence[int], shares: Sequence[float]) -> list[list[Entry]]:
        return cut_line([self.strips[sample] for sample in samples], shares, self.cost, self.least_tokens)

    def _price(self, entries: Sequence[Entry]) -> float:
        return price(entries, self.strips, self.cost)

    def _fan(self, samples: list[int], shares: Sequence[float]) -> list[list[Entry]]:
        """A wave of a few samples, each cut over all ranks, from the first and from the last in turn, as the beginning
        of a sample has many tokens.
        """
        if len(samples) == 1 and (parts := zigzag(self.strips[samples[0]], self.ranks, self.least_tokens)):
            return parts
        cuts = [self._line([each], shares[::way])[::way] for each, way in zip(samples, cycle((1, -1)), strict=False)]
        return [[*chain.from_iterable(parts)] for parts in zip(*cuts, strict=True)]

    def _fit(self, wave: list[list[Entry]]) -> bool:
        most = max(count_tokens(part, self.lengths) for part in wave)
        return most <= self.token_cap and self._readable([wave])

    def _readable(self, waves: Waves) -> bool:
        return self.most_read(waves) <= self.limits.split_tokens and self._most(waves, bool) <= self.limits.cuts

    def most_read(self, waves: Waves) -> int:
        """The most tokens that others read of one rank."""
        return self._most(waves, len)

    def _most(self, waves: Waves, of: Callable[[Segment], int]) -> int:
        """The most of one rank's segments that others read."""

        def read(each: Entry) -> int:
            return of(each) if isinstance(each, Segment) and each.stop < self.lengths[each.sample] else 0

        return max(sum(map(read, chain.from_iterable(parts))) for parts in zip(*waves, strict=True))

    def assign(self, count: int, waves: Waves) -> SplitAssignment:
        """The assignment that splits the first `count` samples of the order, as in `waves`."""
        rest = self.order[count:]
        whole: list[list[int]] = [[] for _ in range(self.ranks)]
        if rest:
            parts = balanced_partition(self.costs[count:], self.ranks)
            whole = [[rest[i] for i in part] for part in parts]
        # All ride with the segments, or none: a rank with more in the wave's microbatch delays the whole wave.
        if len(waves) == 1 and self.may_ride and (together := self._riding(count, waves[0], whole)):
            waves, whole = [together], [[] for _ in range(self.ranks)]
        # A wave lasts as long as its costliest microbatch.
        waves_cost = math.fsum(max(self.cost.microbatch + self._price(each) for each in wave) for wave in waves)
        few = [-(-count_tokens(own, self.lengths) // self.token_cap) for own in whole]
        return SplitAssignment(
            waves=waves,
            waves_cost=waves_cost,
            whole=whole,
            estimate=waves_cost
            + max(self.cost.microbatch * count + self._price(own) for count, own in zip(few, whole, strict=True)),
        )

    def _riding(self, count: int, wave: list[list[Entry]], whole: list[list[int]]) -> list[list[Entry]] | None:
        """The microbatches of `wave` with the unsplit samples in them; None if these don't fit.

        If that fits too, the line is cut so that each rank's part makes up for its unsplit samples. With more equal
        parts others may have to read fewer tokens.
        """
        missing = [max(self.even_share - self._price(own), 0.0) for own in whole]
        level = math.fsum(missing) / self.ranks
        shares = ([each + more * level for each in missing] for more in (0.0, 0.5, 2.0))
        how = (self._line, self._fan) if 1 < count <= _FANNED else (self._line,)
        cuts = (cut(self.order[:count], each) for each in shares for cut in how)
        ways = ([[*segments, *own] for segments, own in zip(cut, whole, strict=True)] for cut in chain(cuts, [wave]))
        return next(filter(self._fit, ways), None)
