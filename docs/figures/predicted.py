"""Predicted efficiency on 8 to 1,024 GPUs: the share of a step in which they compute."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import markdown, read

AXIS = Axis((0.4, 0.6, 0.8, 1.0), ("better to the right", ""), left=110, form="{:.0%}")
COLOURS = {
    "rank1": "FSDP2 + LB-Micro",
    "rank0": "ODC + LB-Mini; its share is at the right",
    "rank2": "ODC + split (readable within one host only, so only 8 GPUs can run)",
}
WAYS = {"rank1": "FSDP2 + LB-Micro", "rank2": "ODC + split", "rank0": "ODC + LB-Mini"}


def data() -> list:
    return read("scaling.json")["rows"]


def draw(data: list) -> str:
    groups: dict = {}
    for samples in (4, 16):
        for row in data:
            shares = row[f"efficiency_{samples}_samples_per_gpu"]
            dots = {kind: [shares[way]] for kind, way in WAYS.items() if way in shares}
            heading = f"{row['model']}, {samples} samples per GPU"
            groups.setdefault(heading, []).append(Row(f"{row['gpus']:,} GPUs", dots, f"{shares['ODC + LB-Mini']:.0%}"))
    return chart("Predicted share of a step in which GPUs compute", AXIS, groups, COLOURS)


def table(data: list) -> str:
    rows = []
    for row in data:
        few, many = (row[f"efficiency_{samples}_samples_per_gpu"] for samples in (4, 16))
        step = row["step_s_16"]
        assigned = f"{row['dealing_s_16']:.3f} s ({row['dealing_s_16'] / step:.2%})"
        rows.append([row["model"], f"{row['gpus']:,}", *(f"{share:.0%}" for share in (*few.values(), *many.values()))])
        rows[-1] += [f"{step} s", assigned, f"{row['queue_packs_s_16']:.3f} s", f"{row['gb_per_gpu_16']}"]
    names = [f"{way}, {samples}" for samples, shares in ((4, few), (16, many)) for way in shares]
    return markdown(("model", "GPUs", *names, "step, 16", "assignment", "queue's packs", "GB/GPU"), rows)
