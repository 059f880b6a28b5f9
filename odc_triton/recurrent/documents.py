"""What each document of a pack goes on from, in a recurrent layer: a state, and the rows before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from ..plan.entries import Segment
from ..plan.segments import Read, SplitPlan, reads_of, within


@dataclass(frozen=True, slots=True)
class Document:
    """Rows `first` up to, not including, `end` of a pack.

    `reads`: the tokens before it, in order, each held by a Segment of the pack or a PlannedSegment of another rank.
    `ends`: ascending, the tokens after which others go on. `shown`: those of them after which other ranks do.
    """

    first: int
    end: int
    segment: Segment | None
    reads: tuple[Read, ...]
    ends: tuple[int, ...]
    shown: tuple[int, ...]

    def row(self, token: int) -> int:
        """Of a token of its sample."""
        return self.first + token - (0 if self.segment is None else self.segment.start)

    @property
    def base(self) -> tuple[Segment, int] | None:
        """The last segment of the pack before it, and the token up to which it reads that."""
        return _last_here(self.reads)

    @property
    def follows_others(self) -> bool:
        """True if the token before it is another rank's."""
        return bool(self.reads) and not isinstance(self.reads[-1].holder, Segment)

    def before(self, rows: int) -> list[Read]:
        """Its reads of the last `rows` tokens before it."""
        return [] if self.segment is None else within(rows + 1, self.segment, self.reads)


def documents_of(
    bounds: Sequence[int],
    segments: Sequence[Segment | None] | None,
    *,
    plan: SplitPlan | None = None,
    cuts: Mapping[Segment, tuple[int, ...]] = MappingProxyType({}),
    rank: int = 0,
) -> list[Document]:
    """The documents of a pack, in their order. `plan`: of all ranks, whose segments other ranks read up to `cuts`."""
    if not segments or not any(segments):
        return [Document(first, end, None, (), (), ()) for first, end in pairwise(bounds) if first < end]
    own, shown = [segment for segment in segments if segment is not None], dict[Segment, tuple[int, ...]]()
    reads = reads_of(segment for segment in own if plan is None or plan.find(segment) is None)
    for segment in own:
        if plan is not None and plan.find(segment) is not None:
            reads[segment], shown[segment] = tuple(_of_pack(read, rank) for read in plan.reads(segment)), cuts[segment]
    ends = {segment: {*shown.get(segment, ())} for segment in reads}
    for base, token in filter(None, map(_last_here, reads.values())):
        ends[base].add(token)
    return [
        Document(first, end, segment, reads[segment], tuple(sorted(ends[segment])), shown.get(segment, ()))
        if segment is not None
        else Document(first, end, None, (), (), ())
        for (first, end), segment in zip(pairwise(bounds), segments, strict=True)
    ]


def _last_here(reads: Sequence[Read]) -> tuple[Segment, int] | None:
    return next(((read.holder, read.high) for read in reversed(reads) if isinstance(read.holder, Segment)), None)


def _of_pack(read: Read, rank: int) -> Read:
    return read._replace(holder=read.holder.segment) if read.holder.rank == rank else read
