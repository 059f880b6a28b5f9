"""What each document of a pack sees before its own rows: rows of the pack, and rows of other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..plan.entries import Segment
from ..plan.segments import PlannedSegment, Read, SplitPlan, reads_of, within
from .attention import SeenRows


def runs_of(reads: Iterable[Read], rank: int, most: int) -> list[Read]:
    """What the `reads` of one microbatch need of other ranks than `rank`: each row once, up to `most` tokens a run."""
    rows: dict[PlannedSegment, tuple[int, int]] = {}
    for holder, low, high in reads:
        if holder.rank != rank:
            first, end = rows.get(holder, (low, high))
            rows[holder] = min(first, low), max(end, high)
    holders = sorted(rows, key=lambda each: (each.segment.sample, each.segment.start))
    bounds = ((holder, *rows[holder]) for holder in holders)
    return [Read(of, at, min(at + most, high)) for of, low, high in bounds for at in range(low, high, most)]


def rows_before(
    bounds: Sequence[int],
    segments: Sequence[Segment | None],
    *,
    plan: SplitPlan | None,
    runs: Sequence[Read],
    window: int | None,
) -> list[list[SeenRows]]:
    """For each document, in the order of positions. `runs`: the sources other than the pack, from 1.

    Raises ValueError for a segment that is not in the plan and needs rows that are not in the pack, or is needed by
    none.
    """
    first = {segment: start for segment, start in zip(segments, bounds[:-1], strict=True) if segment is not None}
    reads = reads_of(segment for segment in first if plan is None or plan.find(segment) is None)
    read = {each.holder for rows in reads.values() for each in rows}
    if alone := [segment for segment, rows in reads.items() if not rows and segment not in read]:
        raise ValueError(f"{alone[0]} are its only segment here")
    held: dict[Segment, list[tuple[int, Read]]] = {}
    for at, run in enumerate(runs, 1):
        held.setdefault(run.holder.segment, []).append((at, run))
    seen: list[list[SeenRows]] = []
    for segment in segments:
        rows: list[SeenRows] = []
        seen.append(rows)
        if segment is None:
            continue
        read_by = reads[segment] if plan is None or segment in reads else plan.reads(segment)
        for holder, low, high in within(window, segment, read_by):
            of = holder if isinstance(holder, Segment) else holder.segment
            for at, run in held.get(of, ()):
                if run.low < high and low < run.high:
                    rows.append(SeenRows(at, max(low, run.low) - run.low, min(high, run.high) - run.low))
            if of not in held:
                begin = of.start - first[of]
                rows.append(SeenRows(0, low - begin, high - begin))
    return seen
