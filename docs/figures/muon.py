"""Of docs/muon.md the table: an optimizer step, one-sided and as FSDP2's users do it."""

from __future__ import annotations

from statistics import median

from .results import markdown, read

# What the page calls each way, and the bytes that it moves between R ranks, per element.
WAYS = {
    "one-sided": ("one-sided reads and writes", "4 (R - 1) / R"),
    "all-to-all": ("owner and all-to-all", "4 (R - 1) / R"),
    "all-gather": ("all-gather, everyone computes", "2 (R - 1)"),
    "floor": ("Newton-Schulz of a rank's own matrices, nothing else", "0"),
}


def data() -> dict:
    return read("muon.json")


def table(data: dict) -> str:
    rows = []
    for way, (words, moved) in WAYS.items():
        seconds = median(each[way]["seconds"] for each in data["rounds"])
        it, megabytes = data["ratios"][way], data["rounds"][0][way]["bytes"] / 1e6
        interval = f"{it['low']:.2f} to {it['high']:.2f}"
        rows.append([words, f"{seconds:.3f}", f"{it['ratio']:.2f}", interval, f"{megabytes:.1f}", moved])
    columns = ("", "seconds per step", "of ours", "95% interval", "MB between ranks", "bytes per element, all R ranks")
    made = f"Medians of {len(data['rounds'])} interleaved rounds. {data['hardware']}; commit {data['commit'][:7]}."
    return f"{markdown(columns, rows)}\n{made}\n"
