"""The demo's losses, FSDP2's and ours over each other: that they are one line is the point."""

from __future__ import annotations

from .results import read
from .svg import WIDTH, Drawing

OURS = "ODC + split"
LEFT, TOP, HIGH = 40, 34, 150


def data() -> dict:
    """Losses per token of every minibatch, and how far the last ones are apart, relative."""
    report = read("demo.json")
    theirs = report["losses"][report["speedup_split_vs_fsdp2"]["name"]]
    return {"FSDP2": theirs, "ODC": report["losses"][OURS], "spread": report["loss_spread"]}


def draw(data: dict) -> str:
    drawing = Drawing("Loss per token over the demo's minibatches: FSDP2's and ODC's curves coincide", height=230)
    low, high = min(map(min, (data["FSDP2"], data["ODC"]))), max(map(max, (data["FSDP2"], data["ODC"])))
    step = (WIDTH - LEFT - 20) / (len(data["ODC"]) - 1)

    def points(losses: list[float]) -> list[tuple[float, float]]:
        return [(LEFT + i * step, TOP + HIGH * (high - loss) / (high - low)) for i, loss in enumerate(losses)]

    for loss in (high, low):
        y = TOP + HIGH * (high - loss) / (high - low)
        drawing.line([(LEFT, y), (WIDTH - 20, y)], "line")
        drawing.text(LEFT - 6, y + 5, f"{loss:.1f}", "faint", at="end", more="small")
    drawing.line(points(data["FSDP2"]), "rank1", more="thick wide")
    drawing.line(points(data["ODC"]), "ink")
    drawing.text(0, 16, "loss per token", "faint", more="small")
    x = points(data["ODC"])[len(data["ODC"]) // 4][0]
    drawing.line([(x + 40, TOP + 24), (x + 64, TOP + 24)], "rank1", more="thick wide")
    drawing.text(x + 72, TOP + 29, "FSDP2")
    drawing.line([(x + 40, TOP + 48), (x + 64, TOP + 48)], "ink")
    drawing.text(x + 72, TOP + 53, f"ODC: {data['spread']:.0e} apart at the end")
    drawing.text(WIDTH - 20, TOP + HIGH + 24, f"{len(data['ODC'])} minibatches", "faint", at="end", more="small")
    return str(drawing)
