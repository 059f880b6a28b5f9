"""What each document of a pack sees before its own rows: rows of the pack, and rows of other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..plan.entries import Piece
from ..plan.pieces import PlannedPiece, Read, SplitPlan, reads_of, within
from .attention import SeenRows


def runs_of(reads: Iterable[Read], rank: int, most: int) -> list[Read]:
    """What the `reads` of one microbatch need of other ranks than `rank`: each row once, up to `most` tokens a run."""
    rows: dict[PlannedPiece, tuple[int, int]] = {}
    for holder, low, high in reads:
        if holder.rank != rank:
            first, end = rows.get(holder, (low, high))
            rows[holder] = min(first, low), max(end, high)
    holders = sorted(rows, key=lambda each: (each.piece.sample, each.piece.start))
    bounds = ((holder, *rows[holder]) for holder in holders)
    return [Read(of, at, min(at + most, high)) for of, low, high in bounds for at in range(low, high, most)]


def rows_before(
    bounds: Sequence[int],
    pieces: Sequence[Piece | None],
    *,
    plan: SplitPlan | None,
    runs: Sequence[Read],
    window: int | None,
) -> list[list[SeenRows]]:
    """For each document, in the order of positions. `runs`: the sources besides the pack, from 1.

    Raises ValueError for a piece that is not in the plan and needs rows that are not in the pack, or is needed by none.
    """
    first = {piece: start for piece, start in zip(pieces, bounds[:-1], strict=True) if piece is not None}
    reads = reads_of(piece for piece in first if plan is None or plan.find(piece) is None)
    read = {each.holder for rows in reads.values() for each in rows}
    if alone := [piece for piece, rows in reads.items() if not rows and piece not in read]:
        raise ValueError(f"{alone[0]} are its only piece here")
    held: dict[Piece, list[tuple[int, Read]]] = {}
    for at, run in enumerate(runs, 1):
        held.setdefault(run.holder.piece, []).append((at, run))
    seen: list[list[SeenRows]] = []
    for piece in pieces:
        rows: list[SeenRows] = []
        seen.append(rows)
        if piece is None:
            continue
        read_by = reads[piece] if plan is None or piece in reads else plan.reads(piece)
        for holder, low, high in within(window, piece, read_by):
            of = holder if isinstance(holder, Piece) else holder.piece
            for at, run in held.get(of, ()):
                if run.low < high and low < run.high:
                    rows.append(SeenRows(at, max(low, run.low) - run.low, min(high, run.high) - run.low))
            if of not in held:
                begin = of.start - first[of]
                rows.append(SeenRows(0, low - begin, high - begin))
    return seen
