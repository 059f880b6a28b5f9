"""The simulator's speed-ups over FSDP2, one setting varied at a time, as in the paper's study."""

from __future__ import annotations

from .results import markdown, read
from .svg import Drawing

PANELS = {
    "samples per GPU, longalign": "samples per GPU",
    "GPUs": "GPUs",
    "longest sequence, tokens": "longest sequence",
    "token cap / longest sequence": "token cap / longest",
}
CURVES = {  # by key: colour, style, words
    "split": ("rank2", "thick", "with split sequences, over FSDP2 + LB-Micro"),
    "ODC + LB-Mini": ("rank0", "thick", "ODC + LB-Mini, over FSDP2 + LB-Micro"),
    "best": ("rank0", "thick dashed", "ODC + LB-Mini, over the better of two FSDP2 settings"),
}
WIDE, HIGH = 188, 110
LOW, TOP = 1.0, 2.0  # of the scale


def data() -> dict[str, list[dict]]:
    """By panel, of each value the speed-ups."""
    return read("simulator_study.json")["panels"]


def draw(data: dict) -> str:
    title = "Speed-ups over FSDP2 against samples per GPU, GPUs, the longest sequence and the token cap"
    drawing = Drawing(title, height=2 * (HIGH + 62) + 66)
    for index, (panel, words) in enumerate(PANELS.items()):
        x, y = 34 + index % 2 * (WIDE + 62), 28 + index // 2 * (HIGH + 62)
        drawing.text(x, y - 10, words, more="strong")
        for mark in (1.0, 1.5, 2.0):
            at = y + HIGH * (TOP - mark) / (TOP - LOW)
            drawing.line([(x, at), (x + WIDE, at)], "line")
            drawing.text(x - 6, at + 5, f"{mark:.1f}", "faint", at="end", more="small")
        step = WIDE / (len(data[panel]) - 1)
        for curve, (kind, more, _) in CURVES.items():
            points = [(x + i * step, y + HIGH * (TOP - row[curve]) / (TOP - LOW)) for i, row in enumerate(data[panel])]
            drawing.line(points, kind, more=more)
        for i, row in enumerate(data[panel]):
            value = row["value"] if row["value"] < 1024 else f"{row['value'] // 1024}K"
            drawing.text(x + i * step, y + HIGH + 18, str(value), "faint", at="middle", more="small")
    for i, (kind, more, words) in enumerate(CURVES.values()):
        at = 2 * (HIGH + 62) + 14 + 20 * i
        drawing.line([(34, at), (62, at)], kind, more=more)
        drawing.text(72, at + 5, words, "faint", more="small")
    return str(drawing)


def table(data: dict) -> str:
    rows = []
    for panel, values in data.items():
        for row in values:
            shown = (row["ODC + LB-Micro"], row["ODC + LB-Mini"], row["best"], row["split"])
            rows.append([panel, f"{row['value']:,}", *(f"{each:.2f}" for each in shown)])
    return markdown(
        ("varied", "", "ODC + LB-Micro", "ODC + LB-Mini", "ODC + LB-Mini, over the better FSDP2", "split"), rows
    )
