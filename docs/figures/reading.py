"""Reading from owners: which rows of a parameter rank 1 reads from whom, and in which order all ranks read."""

from __future__ import annotations

import json
from pathlib import Path

from odc_triton.comm.layout import shard_rows

from .rows import BOX, TURNS, WHOLE, arrow, box, chips, owners
from .svg import Drawing

RECORDED = Path(__file__).with_name("recorded_kernels.json")


def data(kernel: str = "gather") -> dict:
    """The layout's rows of each owner, and what the kernel accessed in the interpreter: by rank, [owner, row, stop]."""
    recorded = json.loads(RECORDED.read_text())
    world, rows = recorded["world"], recorded["shape"][0]
    return {"owned": [shard_rows(rows, world, owner) for owner in range(world)], "accesses": recorded[kernel]}


def draw(data: dict) -> str:
    drawing = Drawing("Rank 1 reads the rows of a parameter from their owners, in its own order", height=256)
    drawing.text(58, 20, "owners", more="strong")
    drawing.text(214, 20, "rank 1 reads", more="strong")
    drawing.text(480, 20, "every rank's order", at="end", more="strong")
    places = owners(drawing, data["owned"], x=58)
    for (owner, *rows), turn in zip(data["accesses"][1], TURNS, strict=False):
        y = box(drawing, owner, rows, x=214, top=WHOLE, more="pale part")
        arrow(drawing, (58 + BOX + 4, places[owner]), (210, y), owner, turn)
    for rank, accesses in enumerate(data["accesses"]):
        drawing.text(348, places[rank] + 5, f"rank {rank}", "faint", more="small")
        chips(drawing, [owner for owner, *_ in accesses], x=396, y=places[rank])
    return str(drawing)
