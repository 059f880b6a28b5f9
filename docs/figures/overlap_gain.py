"""What a step of GRPO gains by computing while others still sample: the time of phases over its own, with bounds."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import markdown, read

AXIS = Axis((0.9, 1.0, 1.2, 1.4, 1.6, 1.8), ("", "phases are slower"), left=190, form="{:.1f}")
COLOURS = {
    "rank2": "time of a step in phases over one without. Lines are 95% intervals",
    "step": "bound: counted from when phases had their completions",
}
NAMES = {"server": "vLLM, and a rank that trains", "ranks": "two ranks that sample"}


def data() -> dict:
    return read("overlap.json")


def _found(data: dict) -> list[tuple[str, str, dict, float, dict[str, float]]]:
    """By setting: its group and name, its ratio, its bound, and seconds in phases and without."""
    rows = []
    for key, name in NAMES.items():
        of = data[key]
        seconds = {way: of["ways"][way]["median_s"] for way in ("phases", "overlapped")}
        rows.append(("One core per rank", name, of["ratio"], of["bound"]["ratio"], seconds))
    longer = data["sleeping_longer"]["cells"]
    for of in (*data["sleeping"]["cells"], *longer):
        step = ", twice as long" if of in longer else ""
        name = f"{of['ranks']} ranks, {of['rollout_to_update']:g} : 1{step}"
        seconds = {"phases": of["median_s"]["phased"], "overlapped": of["median_s"]["overlapped"]}
        rows.append(("Simulated compute, rollout : update", name, of, of["bound"], seconds))
    return rows


def draw(data: dict) -> str:
    groups: dict[str, list[Row]] = {}
    for group, name, of, bound, _ in _found(data):
        dots = {"rank2": (of["ratio"], of["low"], of["high"])}
        groups.setdefault(group, []).append(Row(name, dots, f"{of['ratio']:.2f}", bound))
    return chart("What overlapping rollout and update gains, with bounds", AXIS, groups, COLOURS)


def table(data: dict) -> str:
    columns = ("setting", "in phases", "without", "ratio", "95% interval", "bound", "share of bound")
    rows = [
        [
            name,
            *(f"{seconds[way]:.2f} s" for way in ("phases", "overlapped")),
            f"{of['ratio']:.2f}",
            f"{of['low']:.2f} to {of['high']:.2f}",
            f"{bound:.2f}",
            f"{of['ratio'] / bound:.2f}",
        ]
        for _, name, of, bound, seconds in _found(data)
    ]
    return markdown(columns, rows)
