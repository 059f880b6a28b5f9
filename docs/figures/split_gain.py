"""What split sequences gain over unsplit ones: on two CPU ranks, and with simulated compute; with bounds."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import NAMES, markdown, read

AXIS = Axis((1.0, 1.5, 2.0, 2.5, 3.0), ("", "split is faster"), left=170)
COLOURS = {
    "rank2": "ODC + split over ODC + LB-Mini; 1.0 = same time",
    "rank1": "ODC + split over DDP. Lines are 95% intervals",
    "step": "ideal balance: equal work on all ranks",
}


OVER = {"rank2": ("over_fastest", "over LB-Mini"), "rank1": ("over_ddp", "over DDP")}


def data() -> dict:
    return read("split.json")


def draw(data: dict) -> str:
    groups: dict = {}
    for cell in data["cpu"]:
        for kind, (key, over) in OVER.items():
            it, label = cell[key], f"{_samples(cell)}, {over}"
            row = Row(label, {kind: (it["ratio"], it["low"], it["high"])}, f"{it['ratio']:.2f}", cell["bound"])
            groups.setdefault("Two CPU ranks, LongAlign", []).append(row)
    for cell in sorted(data["sleeping"], key=lambda cell: (cell["samples_per_rank"], -cell["split_over_lb_mini"])):
        label, ratio = f"{NAMES[cell['lengths']]}, {cell['ranks']} ranks", cell["split_over_lb_mini"]
        row = Row(label, {"rank2": [ratio]}, f"{ratio:.2f}", cell["bound"])
        groups.setdefault(f"Simulated compute, {_samples(cell)} per rank", []).append(row)
    return chart("Speed of split sequences over unsplit ones, with the ideal", AXIS, groups, COLOURS)


def _samples(cell: dict) -> str:
    return f"{cell['samples_per_rank']} sample{'s' * (cell['samples_per_rank'] > 1)}"


def table(data: dict) -> str:
    rows = []
    for cell in data["cpu"]:
        both = [cell[key] for key, _ in OVER.values()]
        ratios = [f"{it['ratio']:.2f} ({it['low']:.2f} to {it['high']:.2f})" for it in both]
        rows.append(["two CPU ranks, LongAlign", f"{cell['samples_per_rank']}", *ratios, f"{cell['bound']:.2f}", ""])
    for cell in data["sleeping"]:
        ratios = [f"{cell['split_over_lb_mini']:.2f}", "", f"{cell['bound']:.2f}", f"{cell['share_of_bound']:.0%}"]
        rows.append(
            [
                f"{NAMES[cell['lengths']]}, {cell['ranks']} ranks, simulated compute",
                f"{cell['samples_per_rank']}",
                *ratios,
            ]
        )
    return markdown(("", "samples per rank", "over ODC + LB-Mini", "over DDP", "ideal", "share of ideal"), rows)
