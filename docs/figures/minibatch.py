"""One minibatch under ours, of the samples in `collectives`: two barriers, and each rank's own pace between them."""

from __future__ import annotations

from odc_triton.jobs.reports.trace import barriers, window_s

from .recorded import OURS, events, microbatches, packs
from .svg import WIDTH, Drawing
from .timeline import bracket, paint, present, rows_of

TOP, BAR, GAP, LEFT = 90, 40, 8, 56
LEAST_S = 5e-4  # a third of a unit is less than a pixel
WORDS = {"enter": "entry", "leave": "exit"}  # of the barriers' labels
BETWEEN = "parameters only read, gradients only added to"


def data() -> dict:
    """Rows of (start, end, state) in seconds, the barriers' moments, and each rank's microbatches and their tokens."""
    found = events("few", OURS)
    start_s, end_s = window_s(found)
    return {
        "rows": rows_of(found, least_s=LEAST_S),
        "barriers": [(WORDS[mark.label.split()[0]], mark.at_s - start_s) for mark in barriers(found)],
        "microbatches": microbatches(found),
        "tokens": [[sum(pack) for pack in own] for own in packs("few", OURS)],
        "seconds": end_s - start_s,
    }


def draw(data: dict) -> str:
    drawing = Drawing("Two ranks over time between two barriers; they wait for each other only there", height=304)
    per_s = (WIDTH - LEFT - 4) / data["seconds"]
    bottom = paint(drawing, data["rows"], x=LEFT, y=TOP, per_s=per_s, height=BAR, gap=GAP)
    for rank, spans in data["microbatches"].items():
        drawing.text(0, TOP + rank * (BAR + GAP) + 25, f"rank {rank}", more="strong")
        for (start_s, end_s), tokens in zip(spans, data["tokens"][rank], strict=True):
            x, y = LEFT + start_s * per_s, bottom + 9 if rank else TOP - 9
            bracket(drawing, x, LEFT + end_s * per_s, y, f"{tokens:,} tokens", below=bool(rank))
    for word, at_s in data["barriers"]:
        x = LEFT + at_s * per_s
        drawing.line([(x, 56), (x, bottom + 58)], "ink", more="barrier thick")
        drawing.text(x, 48, f"{word} barrier", at="start" if word == "entry" else "end", more="strong")
    (_, entry_s), (_, exit_s) = data["barriers"]
    drawing.text(LEFT + (entry_s + exit_s) / 2 * per_s, bottom + 52, BETWEEN, at="middle", more="small")
    drawing.text(WIDTH, bottom + 76, "then step, publish", at="end", more="small")
    drawing.text(0, 16, f"ODC, the same samples: {len(data['barriers'])} barriers", more="strong")
    drawing.text(WIDTH, 16, f"{data['seconds']:.2f} s", "faint", at="end")
    drawing.legend(0, bottom + 112, present(data["rows"]))
    return str(drawing)
