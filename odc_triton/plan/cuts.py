"""What recurrent layers need of a minibatch's plan: rows at the tokens where other ranks go on.

A convolution needs the few rows before a segment, a recurrence the state after the token before it. So a segment
publishes at its *cuts*, the tokens where segments of other ranks go on from it. A segment *knows* its state if all that
it reads is on its rank; what goes on from it needs nothing of those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from .entries import Segment
from .segments import PlannedReads, PlannedSegment, Read, SplitPlan, within


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


class CutPlan(PlannedReads):
    """A plan in which a segment has `rows` rows for each of its cuts, instead of one for each token: a Read's `low` and
    `high`, less the segment's `start`, count these.

    `states`: of recurrences, whose segments read all up to one that knows its state. Else of convolutions, whose
    segments read the last `rows` tokens before them: the end of the rows of a cut. Both of other ranks only.
    """

    def __init__(self, plan: SplitPlan, rows: int, *, states: bool) -> None:
        cuts, offsets = cuts_of(plan), [0] * plan.ranks
        known = {
            each.segment
            for each in plan.segments
            if all(read.holder.rank == each.rank for read in plan.reads(each.segment))
        }

        def at_cut(read: Read) -> Read:
            segment = read.holder.segment
            end = segment.start + (cuts[segment].index(read.high) + 1) * rows
            return Read(segment, end - min(rows, read.high - read.low), end)

        planned: list[PlannedSegment] = []
        reads: dict[Segment, Iterable[Read]] = {}
        for each in plan.segments:
            count = rows * len(cuts[each.segment])
            planned.append(replace(each, read=count, offset=offsets[each.rank]))
            offsets[each.rank] += count
            needed = _chain(plan, each, known) if states else _rows_of_others(plan, each, rows)
            reads[each.segment] = map(at_cut, needed)
        super().__init__(planned, reads)


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
