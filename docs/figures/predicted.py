"""Predicted efficiency on 8 to 1,024 GPUs: an even share of the work over the step's time."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import markdown, read

AXIS = Axis((0.0, 0.25, 0.5, 0.75, 1.0), ("better to the right", ""), left=165, form="{:.0%}")
COLOURS = {
    "rank1": "FSDP2, the fastest of its settings that fit",
    "rank0": "ODC + LB-Mini",
    "rank2": "ODC + split within hosts; its share is at the right",
}
WAYS = {"rank1": "fsdp2", "rank0": "odc", "rank2": "split"}
DRAWN = [(8, 8), (64, 8), (1024, 8), (1024, 4), (1024, 2)]  # GPUs, of each host
MEMORY_GB = {"": 80, ", H200": 141}


def data() -> list:
    return read("scaling.json")["rows"]


def draw(data: list) -> str:
    groups: dict = {}
    for samples in (1, 2, 4):
        for gpus, host in DRAWN:
            where = {"model": "7 B", "gpus": gpus, "gpus_per_host": host, "samples_per_gpu": samples}
            (row,) = (row for row in data if where.items() <= row.items())
            label = f"{gpus:,} GPUs" + (f", {host} a host" if gpus > 8 else "")
            dots = {kind: [row[way]] for kind, way in WAYS.items()}
            heading = f"7 B, {samples} sample{'s' * (samples > 1)} per GPU"
            groups.setdefault(heading, []).append(Row(label, dots, f"{row['split']:.0%}"))
    return chart("Predicted share of a step in which GPUs compute", AXIS, groups, COLOURS)


def table(data: list) -> str:
    rows = []
    for row in data:
        cells = [f"{row[name]:,}" for name in ("gpus", "gpus_per_host", "samples_per_gpu")]
        for way in WAYS.values():
            fitting = (gpu for gpu, most in MEMORY_GB.items() if row["gb"][way] <= most)
            gpu = next(fitting, None)
            cells.append("does not fit" if gpu is None else f"{row[way]:.0%}{gpu}")
        across = f"{row['across_not_built']:.0%}" if "across_not_built" in row else ""
        step = f"{row['step_s']} s"
        planning = f"{row['planning_s']:.3f} s ({row['planning_s'] / row['step_s']:.2%})"
        memory = " / ".join(f"{row['gb'][way]:.0f}" for way in WAYS.values())
        rows.append([row["model"], *cells, row["fsdp2_way"], across, step, planning, memory])
    columns = ("model", "GPUs", "of a host", "samples per GPU", "FSDP2", "LB-Mini", "split", "FSDP2's setting")
    return markdown(
        (*columns, "across hosts (not built)", "split's step", "planning", "GB: FSDP2 / LB-Mini / split"), rows
    )
