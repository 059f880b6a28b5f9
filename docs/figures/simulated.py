"""Of docs/simulator.md the table: minibatches of the demo, measured and predicted."""

from __future__ import annotations

from statistics import mean

from .results import markdown, read, shown


def data() -> dict:
    return read("simulated.json")


def table(data: dict) -> str:
    rows = []
    for name, ratio in data["predicted_over_measured"].items():
        seconds = (f"{mean(data[of][name]):.2f}" for of in ("measured_s", "predicted_s"))
        rows.append([shown(name), *seconds, f"{ratio:.3f}"])
    made = f"6 minibatches, 2 ranks, {data['hardware']}; commit {data['commit'][:7]}."
    return f"{markdown(('', 'measured s', 'predicted s', 'predicted / measured'), rows)}\n{made}\n"
