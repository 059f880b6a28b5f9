"""What each document of a pack sees before its own rows: rows of the pack, and rows of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..balance.pieces import Piece, SplitPlan, reads_of
from .attention import SeenRows
from .exchange import RemoteRows, within


def rows_before(
    bounds: Sequence[int],
    pieces: Sequence[Piece | None],
    *,
    plan: SplitPlan | None,
    runs: Sequence[RemoteRows],
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
    held = {each.piece: (at, run.low) for at, run in enumerate(runs, 1) for each in run.holders}
    seen: list[list[SeenRows]] = []
    for piece in pieces:
        rows: list[SeenRows] = []
        seen.append(rows)
        if piece is None:
            continue
        for holder, low, high in within(window, piece, reads[piece] if piece in reads else plan.reads(piece)):
            of = holder if isinstance(holder, Piece) else holder.piece
            source, begin = held.get(of) or (0, of.start - first[of])
            if source and rows and rows[-1].source == source:  # of the next piece in the same run
                low = rows.pop().low + begin
            rows.append(SeenRows(source, low - begin, high - begin))
    return seen
