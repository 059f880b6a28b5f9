"""One minibatch under FSDP2: a line where both ranks have joined a collective, and the waiting before it."""

from __future__ import annotations

from odc_triton.base.events import total_s
from odc_triton.jobs.reports.trace import barriers, window_s

from .recorded import THEIRS, events, packs
from .svg import WIDTH, Drawing
from .timeline import paint, present, rows_of

TOP, BAR, GAP = 62, 40, 8


def data() -> dict:
    """Rows of (start, end, state) in seconds, when collectives ended, and each rank's samples and waiting."""
    found = events("few", THEIRS)
    start_s, end_s = window_s(found)
    return {
        "rows": rows_of(found),
        "collectives": [mark.at_s - start_s for mark in barriers(found)],
        "tokens": [[sum(pack) for pack in own] for own in packs("few", THEIRS)],
        "waits": [total_s([e for e in found if e.rank == rank], "wait") for rank in (0, 1)],
        "seconds": end_s - start_s,
    }


def draw(data: dict) -> str:
    drawing = Drawing("Two ranks over time: at each collective the rank with less work waits", height=242)
    per_s = WIDTH / data["seconds"]
    bottom = paint(drawing, data["rows"], x=0, y=TOP, per_s=per_s, height=BAR, gap=GAP)
    for at_s in data["collectives"]:
        drawing.line([(at_s * per_s, TOP - 5), (at_s * per_s, bottom + 5)], "ink", more="barrier")
    for rank, tokens in enumerate(data["tokens"]):
        y = bottom + 24 if rank else TOP - 14
        drawing.text(0, y, f"rank {rank}: {' tokens, then '.join(f'{each:,}' for each in tokens)}")
        share = data["waits"][rank] / data["seconds"]
        drawing.text(WIDTH, y, f"waits {share:.0%} of the time", at="end", more="strong")
    drawing.text(0, 16, f"FSDP2, one minibatch: {len(data['collectives'])} collectives", more="strong")
    drawing.text(WIDTH, 16, f"{data['seconds']:.2f} s", "faint", at="end")
    drawing.legend(0, bottom + 62, present(data["rows"]))
    return str(drawing)
