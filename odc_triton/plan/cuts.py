"""What recurrent layers need of a minibatch's plan: rows at the tokens where other ranks go on.

A convolution needs the few rows before a piece, a recurrence the state after the token before it. So a piece publishes
at its *cuts*, the tokens where pieces of other ranks go on from it. A piece *knows* its state if all that it reads is
of its own rank; what goes on from it needs nothing of those before it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from .entries import Piece
from .pieces import PlannedPiece, Read, SplitPlan, within


def cuts_of(plan: SplitPlan) -> dict[Piece, tuple[int, ...]]:
    """Of each piece the tokens, ascending, up to which other ranks read it."""
    found: dict[Piece, set[int]] = {each.piece: set() for each in plan.pieces}
    for each in plan.pieces:
        for holder, _, high in plan.reads(each.piece):
            if holder.rank != each.rank:
                found[holder.piece].add(high)
    return {piece: tuple(sorted(tokens)) for piece, tokens in found.items()}


def most_cuts(plan: SplitPlan) -> tuple[int, int]:
    """The most cuts of a rank, and that rank."""
    cuts, counts = cuts_of(plan), [0] * plan.ranks
    for each in plan.pieces:
        counts[each.rank] += len(cuts[each.piece])
    return max((count, rank) for rank, count in enumerate(counts))


class CutPlan:
    """A plan in which a piece has `rows` rows for each of its cuts, instead of one for each token: a Read's `low` and
    `high`, less the piece's `start`, count these.

    `states`: of recurrences, whose pieces read all up to one that knows its state. Else of convolutions, whose pieces
    read the last `rows` tokens before them: the end of the rows of a cut.
    """

    def __init__(self, plan: SplitPlan, rows: int, *, states: bool) -> None:
        self.cuts = cuts_of(plan)
        self._by_piece: dict[Piece, PlannedPiece] = {}
        offsets = [0] * plan.ranks
        known = {
            each.piece for each in plan.pieces if all(read.holder.rank == each.rank for read in plan.reads(each.piece))
        }
        for each in plan.pieces:
            count = rows * len(self.cuts[each.piece])
            self._by_piece[each.piece] = replace(each, read=count, offset=offsets[each.rank])
            offsets[each.rank] += count
        self._reads: dict[Piece, tuple[Read, ...]] = {}
        self._readers: dict[Piece, list[PlannedPiece]] = {piece: [] for piece in self._by_piece}
        for each in plan.pieces:
            needed = _chain(plan, each, known) if states else _rows_of_others(plan, each, rows)
            self._reads[each.piece] = tuple(self._at_cut(read, rows) for read in needed)
            for read in needed:
                self._readers[read.holder.piece].append(self._by_piece[each.piece])

    def _at_cut(self, read: Read, rows: int) -> Read:
        piece = read.holder.piece
        end = piece.start + (self.cuts[piece].index(read.high) + 1) * rows
        return Read(self._by_piece[piece], end - min(rows, read.high - read.low), end)

    def find(self, piece: Piece) -> PlannedPiece | None:
        return self._by_piece.get(piece)

    def reads(self, piece: Piece) -> tuple[Read, ...]:
        """Of other ranks, in the order of tokens."""
        return self._reads[piece]

    def readers(self, piece: Piece) -> list[PlannedPiece]:
        return self._readers[piece]


def _chain(plan: SplitPlan, reader: PlannedPiece, known: Set[Piece]) -> list[Read]:
    found: list[Read] = []
    for read in reversed(plan.reads(reader.piece)):
        if read.holder.rank == reader.rank:
            break
        found.append(read)
        if read.holder.piece in known:
            break
    return found[::-1]


def _rows_of_others(plan: SplitPlan, reader: PlannedPiece, rows: int) -> Sequence[Read]:
    before = within(rows + 1, reader.piece, plan.reads(reader.piece))
    return [each for each in before if each.holder.rank != reader.rank]
