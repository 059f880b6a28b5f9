"""GB per GPU of Qwen2.5 under ODC and FSDP2, and what a GPU has. Computed by `memory_plan`."""

from __future__ import annotations

from math import log

from bench.reports.memory_table import numbers, table

from .chart import Axis, Row, chart

__all__ = ["data", "draw", "table"]
TICKS = (4, 10, 20, 40, 80, 160, 320, 640)
AXIS = Axis(TICKS, ("fits a GPU of 80 GB", "does not fit"), 80, left=70, scale=log, form="{:g}")
COLOURS = {
    "rank0": "ODC; its GB are at the right. All without activations",
    "rank1": "FSDP2",
    "rank3": "FSDP2, no reshard",
}
data = numbers


def draw(data: dict[str, list[tuple]]) -> str:
    groups: dict[str, list[Row]] = {}
    for model, gpus, *parts in data["gpus"]:
        odc, fsdp2, whole = (total / 1e9 for total in (parts[4], parts[-2], parts[-1]))
        dots = {"rank1": [fsdp2], "rank3": [whole], "rank0": [odc]}
        label = f"{gpus} GPU{'s' * (gpus != '1')}"
        groups.setdefault(f"Qwen2.5 {model}", []).append(Row(label, dots, f"{odc:.0f} GB"))
    return chart("GB per GPU under ODC and FSDP2, for 1.5 B to 32 B and 1 to 8 GPUs", AXIS, groups, COLOURS)
