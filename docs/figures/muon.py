"""Of docs/muon.md the table: an optimizer step, one-sided and as FSDP2's users do it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

FILE = Path(__file__).parents[2] / "bench" / "results" / "muon.json"
# What the pages call each way, and the bytes that it moves between R ranks, per element.
WAYS = {
    "one-sided": ("one-sided reads and writes", "4 (R - 1) / R"),
    "all-to-all": ("owner and all-to-all", "4 (R - 1) / R"),
    "all-gather": ("all-gather, everyone computes", "2 (R - 1)"),
    "floor": ("Newton-Schulz of a rank's own matrices, nothing else", "0"),
}


def data() -> dict:
    return json.loads(FILE.read_text(encoding="utf-8"))


def table(data: dict) -> str:
    head = "| | seconds per step | of ours (95% interval) | MB between ranks | bytes per element, R ranks together |"
    lines = [head, "| --- | --: | --: | --: | --: |"]
    for way, (words, moved) in WAYS.items():
        seconds = median(each[way]["seconds"] for each in data["rounds"])
        ratio, megabytes = data["ratios"][way], data["rounds"][0][way]["bytes"] / 1e6
        times = f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        lines.append(f"| {words} | {seconds:.3f} | {times} | {megabytes:.1f} | {moved} |")
    made = f"Medians of {len(data['rounds'])} interleaved rounds. {data['hardware']}; commit {data['commit'][:7]}."
    return "\n".join([*lines, "", made, ""])
