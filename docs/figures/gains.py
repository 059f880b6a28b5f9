"""Who gains, and who does not: other ways' time over ODC's, on two CPU ranks."""

from __future__ import annotations

from statistics import mean

from .chart import Axis, Row, chart
from .results import markdown, read, shown

AXIS = Axis(
    (0.8, 1.0, 1.2, 1.4, 1.6),
    ("← faster than ODC", "slower than ODC →"),
    form="{:.1f}×",
    label="Time per minibatch ÷ ODC’s time; right of 1.0×, ODC is faster",
)
COLOURS = {"rank0": "slower than ODC, with the 95% interval", "bad": "faster than ODC"}
OURS = "ODC + LB-Mini"
LABELS = {  # of the rows that are drawn; the table has all
    "FSDP2 + global packing": "FSDP2",
    "FSDP2 no reshard + LB-Mini": "FSDP2, no reshard",
    "DDP no_sync + LB-Mini": "DDP",
    "layer barrier + global packing": "per-layer barrier",
    "ODC + LB-Mini": "ODC, not split",
}
HEADINGS = {"ODC + split": "split ODC", OURS: "ODC"}
# What demo.json compares: over whose time.
DEMO = {"speedup_split_vs_fsdp2": "ODC + split", "speedup_split_vs_fastest": "ODC + split"}
DEMO |= {"speedup_vs_fsdp2": OURS, "speedup_vs_fastest": OURS}


def data() -> dict:
    """Ratios by what was trained and over whose time, with seconds and idle shares where there are some."""
    demo, cells = read("demo.json"), read("end_to_end.json")["cells"]
    found: dict = {}
    for key, ours in DEMO.items():
        theirs = demo[key].get("name", "FSDP2 + global packing")
        found.setdefault(f"The demo, over {HEADINGS[ours]}", {})[theirs] = demo[key]
    for name, cell in cells.items():
        heading = f"{name[0].upper()}{name[1:].removesuffix(' / 32')} lengths, over {HEADINGS[OURS]}"
        found[heading] = {way: it for way, it in cell["variants"].items() if way in LABELS and way != OURS}
    return {"ratios": found, "demo": demo, "cells": cells}


def draw(data: dict) -> str:
    groups = {}
    for heading, ways in data["ratios"].items():
        ordered = sorted(ways.items(), key=lambda item: -item[1]["ratio"])
        groups[heading] = []
        for way, it in ordered:
            kind, interval = "rank0" if it["ratio"] > 1 else "bad", (it["ratio"], it["low"], it["high"])
            row = Row(LABELS[way], {kind: interval}, f"{it['ratio']:.2f}", strong=kind == "bad")
            groups[heading].append(row)
    return chart("Time per minibatch of FSDP2, DDP and a per-layer barrier over ODC's", AXIS, groups, COLOURS)


def table(data: dict) -> str:
    rows = []
    for name, seconds in data["demo"]["seconds"].items():
        timed = seconds[data["demo"]["warm_up_minibatches"] :]
        rows.append(["demo", name, f"{mean(timed):.2f}", "", "", f"{data['demo']['idle_fraction'][name]:.1%}"])
    for name, cell in data["cells"].items():
        for way, it in cell["variants"].items():
            idle = "not recorded" if "DDP" in way else f"{mean(it['idle_fraction']):.1%}"
            took = (f"{mean(it['seconds']):.2f}", f"{it['ratio']:.2f}", f"{it['low']:.2f} to {it['high']:.2f}")
            rows.append([name, shown(way), *took, idle])
    return markdown(("lengths", "way", "s per minibatch", "time over ODC + LB-Mini's", "95% interval", "idle"), rows)
