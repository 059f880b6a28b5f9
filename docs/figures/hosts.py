"""What split sequences gain on several hosts, each of which splits its own samples, with simulated compute."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import NAMES, markdown, read

AXIS = Axis((1.0, 1.5, 2.0, 2.5, 3.0, 3.5), ("", "split is faster"), left=170)
COLOURS = {
    "rank2": "ODC + split over ODC + LB-Mini; 1.0 = same time",
    "rank1": "ODC + split over a barrier per layer, global packing",
    "step": "ideal balance, or a host's longest sample, over LB-Mini",
}
OVER = {"rank2": "over_lb_mini", "rank1": "over_barriers"}


def data() -> list[dict]:
    return read("hosts.json")["sleeping"]


def draw(data: list[dict]) -> str:
    groups: dict = {}
    for cell in sorted(data, key=lambda cell: (cell["hosts"] * 100 + cell["ranks"], cell["samples_per_rank"])):
        label = f"{NAMES[cell['lengths']]}, {cell['samples_per_rank']} per rank"
        dots = {kind: [cell[key]] for kind, key in OVER.items()}
        row = Row(label, dots, f"{cell['over_lb_mini']:.2f}", cell["over_lb_mini"] / cell["share_of_bound"])
        groups.setdefault(f"{cell['hosts']} hosts of {cell['ranks'] // cell['hosts']} ranks", []).append(row)
    return chart("Speed of split sequences over unsplit ones on several hosts, with the ideal", AXIS, groups, COLOURS)


def table(data: list[dict]) -> str:
    rows = [
        [
            f"{cell['hosts']} x {cell['ranks'] // cell['hosts']}, {NAMES[cell['lengths']]}",
            f"{cell['samples_per_rank']}",
            *(f"{cell[key]:.2f}" for key in OVER.values()),
            *(f"{cell[key]:.0%}" for key in ("share_of_bound", "even_share")),
        ]
        for cell in data
    ]
    columns = (
        "hosts x ranks",
        "samples per rank",
        "over LB-Mini",
        "over per-layer barriers",
        "share of ideal",
        "ideal: GPUs compute",
    )
    return markdown(columns, rows)
