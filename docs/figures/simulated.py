"""Of docs/simulator.md the table: minibatches of the demo, measured and predicted."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

FILE = Path(__file__).parents[2] / "bench" / "results" / "simulated.json"


def data() -> dict:
    return json.loads(FILE.read_text(encoding="utf-8"))


def table(data: dict) -> str:
    lines = ["| | measured s | predicted s | predicted / measured |", "| --- | --: | --: | --: |"]
    for name, ratio in data["predicted_over_measured"].items():
        seconds = " | ".join(f"{mean(data[of][name]):.2f}" for of in ("measured_s", "predicted_s"))
        lines.append(f"| {name} | {seconds} | {ratio:.3f} |")
    made = f"6 minibatches, 2 ranks, {data['hardware']}; commit {data['commit'][:7]}."
    return "\n".join([*lines, "", made, ""])
