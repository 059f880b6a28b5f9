"""Paints ranks over time: boxes to scale, one row a rank. Waiting is the loudest colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from odc_triton.base.events import Event
from odc_triton.jobs.reports.trace import UNRECORDED, segments, window_s

from .svg import Drawing

# The words of each colour, in the order of the legend.
STATES = {
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer step",
    "publish": "publishing",
    "wait": "waiting",
}
Rows = Mapping[int, Sequence[tuple[float, float, str]]]


def rows_of(events: Sequence[Event], *, least_s: float = 0.0) -> dict[int, list[tuple[float, float, str]]]:
    """Each rank's time as (start, end, state) from 0 s on. What is shorter than `least_s` joins what precedes it."""
    start_s = window_s(events)[0]
    rows: dict[int, list[tuple[float, float, str]]] = {}
    for rank, found in segments(events).items():
        row: list[tuple[float, float, str]] = []
        for left_s, right_s, state in found:
            kind = "wait" if state == UNRECORDED else state
            if row and (row[-1][2] == kind or right_s - left_s < least_s):
                row[-1] = (row[-1][0], right_s - start_s, row[-1][2])
            else:
                row.append((left_s - start_s, right_s - start_s, kind))
        rows[rank] = row
    return rows


def paint(drawing: Drawing, rows: Rows, *, x: float, y: float, per_s: float, height: float, gap: float = 4) -> float:
    """Draws the boxes, `per_s` units a second, from `y` down; returns the `y` below the last row."""
    for spans in rows.values():
        for start_s, end_s, state in spans:
            tip = f"{STATES.get(state, state)}, {1e3 * (end_s - start_s):.0f} ms"
            drawing.rect(x + start_s * per_s, y, (end_s - start_s) * per_s, height, state, tip=tip)
        y += height + gap
    return y - gap


def present(*tracks: Rows) -> dict[str, str]:
    """The legend of the states that occur."""
    seen: Iterable[str] = {state for rows in tracks for spans in rows.values() for _, _, state in spans}
    return {state: words for state, words in STATES.items() if state in seen}


def bracket(drawing: Drawing, start: float, end: float, y: float, words: str, *, below: bool = False) -> None:
    """A line from `start` to `end` with `words` in its middle, above what it spans or `below` it."""
    tick = -5 if below else 5
    drawing.line([(start + 2, y + tick), (start + 2, y), (end - 2, y), (end - 2, y + tick)], more="bracket")
    drawing.text((start + end) / 2, y + (17 if below else -6), words, "faint", at="middle", more="small")
