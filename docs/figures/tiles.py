"""The fused kernels, tile by tile: y = x Wᵀ on rank 1, the tiles in the order in which programs start."""

from __future__ import annotations

import json

from odc_triton.comm.layout import shard_rows

from .reading import RECORDED
from .svg import Drawing

X, TOP, UNIT = 96, 96, 3  # where y begins; units a column and a token


def data() -> dict:
    """Of every tile, in launch order: the owner that its program read, [first, stop] of its tokens and columns."""
    recorded = json.loads(RECORDED.read_text())
    found, world = recorded["linear"], recorded["world"]
    # A device counts programs with the first index fastest; the interpreter runs them with the last one fastest.
    tiles = [tile for _, *tile in sorted(found["tiles"], key=lambda tile: tile[0][::-1])]
    owned = [shard_rows(found["rows"], world, owner) for owner in range(world)]
    return {"rank": found["rank"], "tokens": found["tokens"], "owned": owned, "tiles": tiles}


def draw(data: dict) -> str:
    title = "Tiles of an output, numbered as their programs start; each reads the weight's rows of one owner"
    drawing = Drawing(title, height=264)
    drawing.text(0, 49, "rows of W", more="strong")
    drawing.text(0, TOP + 29, "y = x Wᵀ", more="strong")
    drawing.text(0, TOP + 49, f"on rank {data['rank']}", "faint")
    for owner, (first, stop) in enumerate(data["owned"]):
        x, width = X + first * UNIT, (stop - first) * UNIT
        drawing.rect(x + 2, 32, width - 4, 24, f"rank{owner}", tip=f"rows {first} to {stop - 1}", more="owned")
        drawing.text(x + width / 2, 20, f"rank {owner}", at="middle")
    for number, (owner, (token, last), (first, stop)) in enumerate(data["tiles"], 1):
        x, y = X + first * UNIT, TOP + token * UNIT
        drawing.rect(
            x + 1, y + 1, (stop - first) * UNIT - 2, (last - token) * UNIT - 2, f"rank{owner}", more="pale tile"
        )
        drawing.text(
            (2 * x + (stop - first) * UNIT) / 2, (2 * y + (last - token) * UNIT) / 2 + 5, str(number), at="middle"
        )
        if token == 0:
            middle = x + (stop - first) * UNIT / 2
            drawing.line([(middle, 58), (middle, TOP - 4)], f"rank{owner}", more="arrow")
    return str(drawing)
