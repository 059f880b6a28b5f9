"""Adding into owners: the blocks of rank 1's gradient go to their owners, where those of all ranks are summed."""

from __future__ import annotations

from . import reading
from .rows import BOX, TURNS, WHOLE, arrow, box, chips, owners
from .svg import Drawing


def data() -> dict:
    """As of reading; `added`: at each owner the ranks in the order in which they come if all keep pace."""
    found = reading.data("scatter")
    turns = range(len(found["owned"]))
    found["added"] = [
        [rank for turn in turns for rank, accesses in enumerate(found["accesses"]) if accesses[turn][0] == owner]
        for owner in turns
    ]
    return found


def draw(data: dict) -> str:
    drawing = Drawing("Rank 1 adds the rows of its gradient into their owners' sums, as the other ranks do", height=256)
    drawing.text(0, 20, "rank 1's gradient", more="strong")
    drawing.text(226, 20, "owners' sums", more="strong")
    drawing.text(480, 20, "added by", at="end", more="strong")
    places = owners(drawing, data["owned"], x=226, label=226 + BOX + 12)
    for (owner, *rows), turn in zip(data["accesses"][1], TURNS, strict=False):
        y = box(drawing, owner, rows, x=0, top=WHOLE, more="pale part")
        arrow(drawing, (4 + BOX, y), (222, places[owner]), owner, turn)
    for owner, ranks in enumerate(data["added"]):
        chips(drawing, ranks, x=396, y=places[owner])
    return str(drawing)
