"""What shared prefixes gain: on two CPU ranks, with bounds, and with simulated compute."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import markdown, read

AXIS = Axis((1.0, 2.0, 3.0, 4.0), ("", "trees over ranks are faster"), left=190)
COLOURS = {
    "rank2": "over unsplit samples, the fastest of FSDP2 (two ways), DDP, ODC",
    "rank1": "over a tree per rank. Lines are 95% intervals",
    "rank3": "over prefixes repeated on each rank",
    "step": "bound: FLOPs of the fuller rank",
}
OVER = {"rank2": "over_dense", "rank1": "over_tree_per_rank", "rank3": "over_repeated"}


def data() -> dict:
    return read("prefixes.json")


def draw(data: dict) -> str:
    groups: dict = {}
    for cell in data["cpu"]:
        for kind, key in OVER.items():
            it, label = cell[key], _of(cell) if kind == "rank2" else ""
            row = Row(label, {kind: (it["ratio"], it["low"], it["high"])}, f"{it['ratio']:.2f}", cell["bounds"][key])
            groups.setdefault("Two CPU ranks", []).append(row)
    for cell in data["sleeping"]:
        for kind, key in [*OVER.items()][1:]:
            label = _asleep(cell) if kind == "rank1" else ""
            row = Row(label, {kind: [cell[key]]}, f"{cell[key]:.2f}")
            groups.setdefault("Simulated compute, agentic lengths", []).append(row)
    return chart("Speed of trees over ranks over three other ways, with bounds", AXIS, groups, COLOURS)


def _of(cell: dict) -> str:
    if cell["turns"]:
        return f"{cell['groups']} chats of {cell['turns']} turns"
    return f"{cell['groups']} x 8, {cell['prompt']:,} + {cell['completion']}"


def _asleep(cell: dict) -> str:
    cap = ", cap 40K" if cell["token_cap"] == 40_000 else ""
    return f"{cell['ranks']} ranks, {cell['trees_per_rank']:g} a rank{cap}"


def table(data: dict) -> str:
    rows = []
    for cell in data["cpu"]:
        ratios = [(cell[key], cell["bounds"][key]) for key in (*OVER.values(), "over_prefix_grouper")]
        words = [f"{it['ratio']:.2f} ({it['low']:.2f} to {it['high']:.2f}) of {bound:.2f}" for it, bound in ratios]
        rows.append([f"two CPU ranks: {_of(cell)}", *words, ""])
    for cell in data["sleeping"]:
        both = [f"{cell[key]:.2f}" for key in ("over_tree_per_rank", "over_repeated")]
        rows.append([f"simulated compute: {_asleep(cell)}", "", *both, "", f"{cell['over_even_share']:.0%}"])
    columns = ("prompts x completions, their tokens", "over unsplit samples", "over a tree per rank", "over repeated")
    return markdown((*columns, "over FSDP2, a group on one rank", "of an even share"), rows)
