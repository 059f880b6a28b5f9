"""Of docs/work_queue.md the table: LB-Mini and the queue, on equal ranks and with a slow one."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "bench" / "results" / "work_queue.json"


def data() -> dict:
    return json.loads(FILE.read_text(encoding="utf-8"))


def table(data: dict) -> str:
    names = ("lengths", "samples per rank", "slow rank", "LB-Mini s", "queue s")
    lines = [f"| {' | '.join(names)} | queue is faster by | simulated | best possible |"]
    lines.append("| --- | --: | --- | --: | --: | --: | --: | --: |")
    for row in data["rows"]:
        slow = "none" if row["slower"] == 1 else f"{row['slower']}x"
        seconds = " | ".join(f"{sum(row[name]):.2f}" for name in ("mini_s", "queue_s"))
        ratios = " | ".join(f"{row[name]:.3f}" for name in ("ratio", "ratio_simulated", "ratio_best"))
        lines.append(f"| {row['lengths']} | {row['samples_per_rank']} | {slow} | {seconds} | {ratios} |")
    made = f"Best possible: all ranks busy to the end, the longest sample on a fast one. {data['hardware']}; commit "
    return "\n".join([*lines, "", f"{made}{data['commit'][:7]}.", ""])
