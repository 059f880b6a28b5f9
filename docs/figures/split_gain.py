"""What split sequences gain over whole ones: on two CPU ranks, and on ranks whose layers sleep; with bounds."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import NAMES, markdown, read

AXIS = Axis((1.0, 1.5, 2.0, 2.5, 3.0), ("", "split is faster"), left=170)
COLOURS = {
    "rank2": "ODC + split over ODC + LB-Mini; 1.0 = same time",
    "rank1": "ODC + split over DDP. Lines are 95% intervals",
    "step": "bound: even work on all ranks",
}


def data() -> dict:
    found = read("split.json")
    return {"cpu": found["cpu"], "sleeping": found["sleeping"]}


def draw(data: dict) -> str:
    groups: dict = {"Two CPU ranks, LongAlign": []}
    for cell in data["cpu"]:
        samples = cell["samples_per_rank"]
        for kind, key, over in (("rank2", "over_fastest", "LB-Mini"), ("rank1", "over_ddp", "DDP")):
            it = cell[key]
            label = f"{samples} sample{'s' * (samples > 1)}, over {over}"
            interval = (it["ratio"], it["low"], it["high"])
            groups["Two CPU ranks, LongAlign"].append(Row(label, {kind: interval}, f"{it['ratio']:.2f}", cell["bound"]))
    for cell in sorted(data["sleeping"], key=lambda cell: (cell["samples_per_rank"], -cell["split_over_lb_mini"])):
        samples, ratio = cell["samples_per_rank"], cell["split_over_lb_mini"]
        heading = f"Ranks that sleep, {samples} sample{'s' * (samples > 1)} per rank"
        label = f"{NAMES[cell['lengths']]}, {cell['ranks']} ranks"
        groups.setdefault(heading, []).append(Row(label, {"rank2": [ratio]}, f"{ratio:.2f}", cell["bound"]))
    return chart("Speed of split sequences over whole ones, with bounds", AXIS, groups, COLOURS)


def table(data: dict) -> str:
    rows = []
    for cell in data["cpu"]:
        ratios = [f"{it['ratio']:.2f} ({it['low']:.2f} to {it['high']:.2f})" for it in _both(cell)]
        rows.append(["two CPU ranks, LongAlign", f"{cell['samples_per_rank']}", *ratios, f"{cell['bound']:.2f}", ""])
    for cell in data["sleeping"]:
        bound = (f"{cell['bound']:.2f}", f"{cell['share_of_bound']:.0%}")
        name = f"{NAMES[cell['lengths']]}, {cell['ranks']} that sleep"
        rows.append([name, f"{cell['samples_per_rank']}", f"{cell['split_over_lb_mini']:.2f}", "", *bound])
    return markdown(("", "samples per rank", "over ODC + LB-Mini", "over DDP", "bound", "of the bound"), rows)


def _both(cell: dict) -> tuple[dict, dict]:
    return cell["over_fastest"], cell["over_ddp"]
