"""What recurrent layers need of a minibatch's plan: rows at the tokens where other ranks go on.

A convolution needs the few rows before a segment, a recurrence the state after the token before it. So a segment
publishes at its *cuts*, the tokens where segments of other ranks go on from it. A segment *knows* its state if all that
it reads is on its rank; what goes on from it needs nothing of those before it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from .entries import Segment
from .segments import PlannedSegment, Read, SplitPlan, within


def cuts_of(plan: SplitPlan) -> dict[Segment, tuple[int, ...]]:
    """For each segment the tokens, ascending, up to which other ranks read it."""
    found: dict[Segment, set[int]] = {each.segment: set() for each in plan.segments}
    for each in plan.segments:
        for holder, _, high in plan.reads(each.segment):
            if holder.rank != each.rank:
                found[holder.segment].add(high)
    return {segment: tuple(sorted(tokens)) for segment, tokens in found.items()}


def most_cuts(plan: SplitPlan) -> tuple[int, int]:
    """The most cuts of a rank, and that rank."""
    cuts, counts = cuts_of(plan), [0] * plan.ranks
    for each in plan.segments:
        counts[each.rank] += len(cuts[each.segment])
    return max((count, rank) for rank, count in enumerate(counts))


class CutPlan:
    """A plan in which a segment has `rows` rows for each of its cuts, instead of one for each token: a Read's `low` and
    `high`, less the segment's `start`, count these.

    `states`: of recurrences, whose segments read all up to one that knows its state. Else of convolutions, whose
    segments read the last `rows` tokens before them: the end of the rows of a cut.
    """

    def __init__(self, plan: SplitPlan, rows: int, *, states: bool) -> None:
        self.cuts = cuts_of(plan)
        self._by_segment: dict[Segment, PlannedSegment] = {}
        offsets = [0] * plan.ranks
        known = {
            each.segment
            for each in plan.segments
            if all(read.holder.rank == each.rank for read in plan.reads(each.segment))
        }
        for each in plan.segments:
            count = rows * len(self.cuts[each.segment])
            self._by_segment[each.segment] = replace(each, read=count, offset=offsets[each.rank])
            offsets[each.rank] += count
        self._reads: dict[Segment, tuple[Read, ...]] = {}
        self._readers: dict[Segment, list[PlannedSegment]] = {segment: [] for segment in self._by_segment}
        for each in plan.segments:
            needed = _chain(plan, each, known) if states else _rows_of_others(plan, each, rows)
            self._reads[each.segment] = tuple(self._at_cut(read, rows) for read in needed)
            for read in needed:
                self._readers[read.holder.segment].append(self._by_segment[each.segment])

    def _at_cut(self, read: Read, rows: int) -> Read:
        segment = read.holder.segment
        end = segment.start + (self.cuts[segment].index(read.high) + 1) * rows
        return Read(self._by_segment[segment], end - min(rows, read.high - read.low), end)

    def find(self, segment: Segment) -> PlannedSegment | None:
        return self._by_segment.get(segment)

    def reads(self, segment: Segment) -> tuple[Read, ...]:
        """Of other ranks, in the order of tokens."""
        return self._reads[segment]

    def readers(self, segment: Segment) -> list[PlannedSegment]:
        return self._readers[segment]


def _chain(plan: SplitPlan, reader: PlannedSegment, known: Set[Segment]) -> list[Read]:
    found: list[Read] = []
    for read in reversed(plan.reads(reader.segment)):
        if read.holder.rank == reader.rank:
            break
        found.append(read)
        if read.holder.segment in known:
            break
    return found[::-1]


def _rows_of_others(plan: SplitPlan, reader: PlannedSegment, rows: int) -> Sequence[Read]:
    before = within(rows + 1, reader.segment, plan.reads(reader.segment))
    return [each for each in before if each.holder.rank != reader.rank]
