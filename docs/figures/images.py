"""Two ranks train the same images and texts over time: FSDP2 with dummy images, and ours, to one scale."""

from __future__ import annotations

from odc_triton.base.events import Event
from odc_triton.jobs.reports.trace import idle_fraction, window_s

from .results import read
from .svg import Drawing
from .timeline import paint, present, rows_of

WIDTH, LEFT, BAR = 520, 50, 22
TITLES = ("FSDP2, dummy images, global packing", "ODC, no dummies, balanced by tower and text")


def data() -> dict:
    """Of both ways, in the minibatch of median gain: rows of (start, end, state), seconds and the idle share."""
    found = {}
    for title, rows in zip(TITLES, read("images.json")["cpu"]["events"].values(), strict=True):
        events = [Event.of_row(row) for row in rows]
        start_s, end_s = window_s(events)
        shown = rows_of(events, least_s=(end_s - start_s) / WIDTH)
        found[title] = {"rows": shown, "seconds": end_s - start_s, "idle": idle_fraction(events)}
    return found


def draw(data: dict) -> str:
    title = (
        "Two ranks with images over time: under FSDP2 transfers take longer and ranks wait in layers; ODC ends sooner"
    )
    drawing = Drawing(title, width=WIDTH, height=224)
    per_s = (WIDTH - LEFT - 8) / max(way["seconds"] for way in data.values())
    y = 34.0
    for name, way in data.items():
        drawing.text(0, y - 10, name, more="strong")
        drawing.text(WIDTH - 8, y - 10, f"{way['seconds']:.2f} s, {way['idle']:.0%} idle", at="end")
        for rank in way["rows"]:
            drawing.text(0, y + rank * (BAR + 4) + 18, f"rank {rank}", "faint", more="small")
        y = paint(drawing, way["rows"], x=LEFT, y=y, per_s=per_s, height=BAR) + 42
    drawing.legend(LEFT, y - 8, present(*(way["rows"] for way in data.values())))
    return str(drawing)
