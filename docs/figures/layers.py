"""Of docs/layers.md the table: replaced layers and a model's layers, in two runs."""

from __future__ import annotations

from statistics import median

from .results import markdown, read

WAYS = {
    "unsharded": "plain transformers, unsharded",
    "ODC + LB-Mini": "ODC, the model's layers",
    "ODC, replaced layers": "ODC, replaced layers",
    "ODC, replaced layers, wgrad fused": "the same, weight gradients `fused`",
    "ODC, replaced layers, wgrad split": "the same, all `whole`, the embedding's too",
}


def data() -> list[dict]:
    return [read("layers.json"), read("layers_second.json")]


def table(data: list[dict]) -> str:
    first, second = data
    rows = []
    for way, words in WAYS.items():
        it, again = first["ratios"][way], second["ratios"][way]["ratio"]
        quartiles = f"{it['low']:.2f} to {it['high']:.2f}"
        rows.append([words, f"{median(first['seconds'][way]):.2f}", f"{it['ratio']:.2f}", quartiles, f"{again:.2f}"])
    columns = ("", "s per minibatch", "of plain transformers", "quartiles of the rounds", "in a second run")
    made = "Ratios of medians; quartiles of each round's own ratios."
    return f"{markdown(columns, rows)}\n{made} {first['hardware']}; commit {first['commit'][:7]}.\n"
