"""What each document of a pack goes on from, in a recurrent layer: a state, and the rows before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from ..plan.entries import Piece
from ..plan.pieces import Read, SplitPlan, reads_of, within


@dataclass(frozen=True, slots=True)
class Document:
    """Rows `first` up to, not including, `end` of a pack.

    `reads`: the tokens before it, in order, each held by a Piece of the pack or a PlannedPiece of another rank. `ends`:
    ascending, the tokens after which others go on. `shown`: those of them after which other ranks do.
    """

    first: int
    end: int
    piece: Piece | None
    reads: tuple[Read, ...]
    ends: tuple[int, ...]
    shown: tuple[int, ...]

    def row(self, token: int) -> int:
        """Of a token of its sample."""
        return self.first + token - (0 if self.piece is None else self.piece.start)

    @property
    def base(self) -> tuple[Piece, int] | None:
        """The last piece of the pack before it, and the token up to which it reads that."""
        return _last_here(self.reads)

    @property
    def follows_others(self) -> bool:
        """True if the token before it is another rank's."""
        return bool(self.reads) and not isinstance(self.reads[-1].holder, Piece)

    def before(self, rows: int) -> list[Read]:
        """Its reads of the last `rows` tokens before it."""
        return [] if self.piece is None else within(rows + 1, self.piece, self.reads)


def documents_of(
    bounds: Sequence[int],
    pieces: Sequence[Piece | None] | None,
    *,
    plan: SplitPlan | None = None,
    cuts: Mapping[Piece, tuple[int, ...]] = MappingProxyType({}),
    rank: int = 0,
) -> list[Document]:
    """The documents of a pack, in their order. `plan`: of all ranks, whose pieces other ranks read up to `cuts`."""
    if not pieces or not any(pieces):
        return [Document(first, end, None, (), (), ()) for first, end in pairwise(bounds) if first < end]
    own, shown = [piece for piece in pieces if piece is not None], dict[Piece, tuple[int, ...]]()
    reads = reads_of(piece for piece in own if plan is None or plan.find(piece) is None)
    for piece in own:
        if plan is not None and plan.find(piece) is not None:
            reads[piece], shown[piece] = tuple(_of_pack(read, rank) for read in plan.reads(piece)), cuts[piece]
    ends = {piece: {*shown.get(piece, ())} for piece in reads}
    for base, token in filter(None, map(_last_here, reads.values())):
        ends[base].add(token)
    return [
        Document(first, end, piece, reads[piece], tuple(sorted(ends[piece])), shown.get(piece, ()))
        if piece is not None
        else Document(first, end, None, (), (), ())
        for (first, end), piece in zip(pairwise(bounds), pieces, strict=True)
    ]


def _last_here(reads: Sequence[Read]) -> tuple[Piece, int] | None:
    return next(((read.holder, read.high) for read in reversed(reads) if isinstance(read.holder, Piece)), None)


def _of_pack(read: Read, rank: int) -> Read:
    return read._replace(holder=read.holder.piece) if read.holder.rank == rank else read
