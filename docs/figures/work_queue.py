"""How much faster the work queue is than LB-Mini, on equal ranks and with a slow one, and what is possible."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import NAMES, markdown, read

AXIS = Axis((0.9, 1.0, 1.1, 1.2, 1.3), ("LB-Mini is faster", "the queue is faster"))
COLOURS = {"rank2": "LB-Mini's time over the queue's", "step": "bound: all ranks busy to the end"}


def data() -> dict:
    return read("work_queue.json")


def draw(data: dict) -> str:
    groups: dict[str, list[Row]] = {}
    for row in data["rows"]:
        heading = "8 equal ranks" if row["slower"] == 1 else f"One of 8 ranks is {row['slower']} times slower"
        label = f"{NAMES[row['lengths']]}, {row['samples_per_rank']} samples"
        shown = Row(label, {"rank2": [row["ratio"]]}, f"{row['ratio']:.2f}", row["ratio_best"])
        groups.setdefault(heading, []).append(shown)
    return chart("The queue is as fast as LB-Mini on equal ranks, faster with a slow one", AXIS, groups, COLOURS)


def table(data: dict) -> str:
    rows = []
    for row in data["rows"]:
        slow = "none" if row["slower"] == 1 else f"{row['slower']}x"
        seconds = [f"{sum(row[name]):.2f}" for name in ("mini_s", "queue_s")]
        ratios = [f"{row[name]:.3f}" for name in ("ratio", "ratio_simulated", "ratio_best")]
        rows.append([NAMES[row["lengths"]], f"{row['samples_per_rank']}", slow, *seconds, *ratios])
    columns = ("lengths", "samples per rank", "slow rank", "LB-Mini s", "queue s")
    made = f"Ideal: the longest sample on a fast rank. {data['hardware']}; commit {data['commit'][:7]}."
    return f"{markdown((*columns, 'speed over LB-Mini', 'simulated', 'ideal'), rows)}\n{made}\n"
