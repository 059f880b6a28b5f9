"""Rows of a tensor, in the memory of their owners or whole on one rank: what the figures reading and adding draw."""

from __future__ import annotations

from .svg import Drawing

TURNS = ("1st", "2nd", "3rd", "4th")
TOP, ROW, GAP, BOX = 44, 16, 12, 72  # of the first row; a row's height; between owners, whose memory is apart; width
WHOLE = TOP + 1.5 * GAP  # where a tensor begins that one rank has whole


def owners(drawing: Drawing, owned: list, *, x: float, label: float = 0) -> list[float]:
    """Each owner's rows as a box of its own; returns the middles."""
    middles = []
    for owner, rows in enumerate(owned):
        middles.append(box(drawing, owner, rows, x=x, top=TOP + owner * GAP, more="owned"))
        drawing.text(label, middles[-1] + 5, f"rank {owner}")
    return middles


def box(drawing: Drawing, owner: int, rows: list, *, x: float, top: float, more: str) -> float:
    """[first, stop] rows of a tensor that begins at `top`; returns their middle."""
    (first, stop), tip = rows, f"rows {rows[0]} to {rows[1] - 1}"
    drawing.rect(x, top + first * ROW, BOX, (stop - first) * ROW, f"rank{owner}", tip=tip, more=more)
    return top + (first + stop) * ROW / 2


def arrow(drawing: Drawing, start: tuple[float, float], end: tuple[float, float], owner: int, words: str) -> None:
    drawing.line([start, end], f"rank{owner}", more="arrow")
    drawing.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 6, words, "faint", at="middle", more="small")


def chips(drawing: Drawing, ranks: list[int], *, x: float, y: float) -> None:
    """Ranks side by side, the first at the left."""
    for place, rank in enumerate(ranks):
        drawing.rect(x + 21 * place, y - 10, 20, 20, f"rank{rank}", more="pale turn")
        drawing.text(x + 21 * place + 10, y + 5, str(rank), at="middle", more="small")
