"""Of docs/layers.md the table: replaced layers beside a model's own, in two runs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parents[2] / "bench" / "results"
WAYS = {
    "unsharded": "plain transformers, unsharded",
    "ODC + LB-Mini": "ODC, own layers",
    "ODC, replaced layers": "ODC, replaced layers",
    "ODC, replaced layers, wgrad fused": "the same, weight gradients `fused`",
    "ODC, replaced layers, wgrad split": "the same, all `split`, the embedding's too",
}


def data() -> list[dict]:
    return [json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in ("layers.json", "layers_second.json")]


def table(data: list[dict]) -> str:
    first, second = data
    lines = ["| | s per minibatch | of plain transformers | quartiles of the rounds | in a second run |"]
    lines.append("| --- | --: | --: | --- | --: |")
    for way, words in WAYS.items():
        ratio = first["ratios"][way]
        spread = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
        seconds, again = median(first["seconds"][way]), second["ratios"][way]["ratio"]
        lines.append(f"| {words} | {seconds:.2f} | {ratio['ratio']:.2f} | {spread} | {again:.2f} |")
    made = "Ratios of medians; quartiles of each round's own ratios"
    return "\n".join([*lines, "", f"{made}. {first['hardware']}; commit {first['commit'][:7]}.", ""])
