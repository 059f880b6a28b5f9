"""What vision-language models gain: on two CPU ranks, measured, and what is counted for more ranks."""

from __future__ import annotations

from statistics import median

from .chart import Axis, Row, chart
from .results import markdown, read, shown

AXIS = Axis((0.75, 1.0, 1.5, 2.0, 2.5), ("", "slower than ODC"), left=190, form="{:.2f}")
COLOURS = {
    "rank2": "time over ODC's, both balanced or neither. Lines are 95% intervals",
    "rank1": "the same if ranks had equal work and none waited: transfers alone",
    "step": "bound: FLOPs, of the fuller rank in each microbatch and each part",
}
LABELS = {
    "FSDP2 + dummy images + global packing": "FSDP2, global packing",
    "FSDP2 no reshard + dummy images + LB-Mini": "FSDP2 without resharding",
    "FSDP2 + dummy images, not balanced": "FSDP2, one sample at a time",
    "ODC + LB-Mini by tokens": "ODC, by tokens alone",
}


def data() -> dict:
    return read("images.json")


def draw(data: dict) -> str:
    groups: dict[str, list[Row]] = {}
    for arm in data["cpu"]["arms"]:
        if label := LABELS.get(arm["name"]):
            dots = {"rank2": (arm["ratio"], arm["low"], arm["high"]), "rank1": [arm["even"]]}
            row = Row(label, dots, f"{arm['ratio']:.2f}", arm["bound"])
            groups.setdefault("Two CPU ranks", []).append(row)
    for of in data["bounds"][1:]:
        found = {LABELS[name]: bound for name, bound in of.items() if name in LABELS and bound > 1.01}
        rows = [Row(label, {}, f"{bound:.2f}", bound) for label, bound in found.items()]
        groups[f"{of['ranks']} ranks, counted, not measured"] = rows
    return chart("Time of FSDP2 with dummy images over ODC's, with bounds", AXIS, groups, COLOURS)


def table(data: dict) -> str:
    rows = []
    for arm in data["cpu"]["arms"]:
        ratio = (f"{arm['ratio']:.2f}", f"{arm['low']:.2f} to {arm['high']:.2f}", f"{arm['bound']:.2f}")
        ratio = (arm["over"], *ratio, f"{arm['even']:.2f}") if arm["name"] in LABELS else ("",) * 5
        peak = f"{arm['memory_bytes'] / 1e6:.0f}"
        rows.append([shown(arm["name"]), f"{arm['token_cap']:,}", f"{median(arm['seconds']):.2f}", *ratio, peak])
    columns = ("way", "tokens of a pack", "s per minibatch", "over", "its time over that")
    return markdown((*columns, "95% interval", "bound", "on equal work", "peak MB of a rank"), rows)
