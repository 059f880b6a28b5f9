"""What recurrent layers need of a minibatch's plan: rows at the tokens where other ranks go on.

A convolution needs the few rows before a segment, a recurrence the state after the token before it. So a segment
publishes at its *cuts*, the tokens where segments of other ranks go on from it. A segment *knows* its state if all that
it reads is on its rank; what goes on from it needs nothing of those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        others = {
            each.segment: [read for read in plan.reads(each.segment) if read.holder.rank != each.rank]
            for each in plan.segments
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
            needed = _chain(plan, each, others) if states else within(rows + 1, each.segment, others[each.segment])
            reads[each.segment] = map(at_cut, needed)
        super().__init__(planned, reads)


def _chain(plan: SplitPlan, reader: PlannedSegment, others: Mapping[Segment, Sequence[Read]]) -> list[Read]:
    """What it reads back to the first that knows its state. `others`: what each reads of other ranks."""
    found: list[Read] = []
    for read in reversed(plan.reads(reader.segment)):
        if read.holder.rank == reader.rank:
            break
        found.append(read)
        if not others[read.holder.segment]:
            break
    return found[::-1]
