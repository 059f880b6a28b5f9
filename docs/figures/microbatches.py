"""The same samples twice: assigned for collectives by global packing, and by LB-Mini."""

from __future__ import annotations

from odc_triton.jobs.reports.trace import idle_fraction, window_s

from .recorded import OURS, THEIRS, events, microbatches, packs
from .svg import WIDTH, Drawing
from .timeline import bracket, paint, present, rows_of

BAR, GAP, LEFT = 34, 6, 56
LEAST_S = 5e-4  # a third of a unit is less than a pixel
WAYS = {THEIRS: "FSDP2, global packing", OURS: "ODC, LB-Mini"}


def data() -> dict:
    """By way: rows of (start, end, state) in seconds, microbatches, tokens of their packs, seconds and idle share."""
    found = {}
    for way, words in WAYS.items():
        track = events("many", way)
        start_s, end_s = window_s(track)
        found[words] = {
            "rows": rows_of(track, least_s=LEAST_S),
            "microbatches": microbatches(track),
            "tokens": [[sum(pack) for pack in own] for own in packs("many", way)],
            "seconds": end_s - start_s,
            "idle": idle_fraction(track),
        }
    return found


def draw(data: dict) -> str:
    drawing = Drawing(
        "Two ranks with the same samples: equal numbers of packs wait, unequal ones hardly do", height=404
    )
    per_s = (WIDTH - LEFT - 4) / max(way["seconds"] for way in data.values())
    top = 66.0
    for words, way in data.items():
        bottom = paint(drawing, way["rows"], x=LEFT, y=top, per_s=per_s, height=BAR, gap=GAP)
        for rank, spans in way["microbatches"].items():
            drawing.text(0, top + rank * (BAR + GAP) + 22, f"rank {rank}", more="strong")
            for number, ((start_s, end_s), tokens) in enumerate(zip(spans, way["tokens"][rank], strict=True)):
                x, y = LEFT + start_s * per_s, bottom + 8 if rank else top - 8
                said = f"{tokens:,}" if number else f"{tokens:,} tokens"
                bracket(drawing, x, LEFT + end_s * per_s, y, said, below=bool(rank))
        counts = " and ".join(str(len(own)) for own in way["tokens"])
        drawing.text(0, top - 50, f"{words}: {counts} packs", more="strong")
        drawing.text(WIDTH, top - 50, f"{way['seconds']:.2f} s, {way['idle']:.0%} idle", "faint", at="end")
        top = bottom + 112
    drawing.legend(0, top - 46, present(*(way["rows"] for way in data.values())))
    return str(drawing)
