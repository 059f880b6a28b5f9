"""Charts of ratios: a row each, with a dot per value, a line for its 95% interval and a tick for its bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .svg import WIDTH, Drawing

RIGHT, STEP = 428, 19


@dataclass(frozen=True)
class Row:
    """`dots`: by colour a value, or value, low and high. `words`: at the row's end."""

    label: str
    dots: Mapping[str, Sequence[float]]
    words: str
    bound: float | None = None
    strong: bool = False


@dataclass(frozen=True)
class Axis:
    """`ticks`: from end to end. `sides`: what left and right of the line at `one` means. `left`: where it begins.
    `label`: what the numbers are, above all.
    """

    ticks: Sequence[float]
    sides: tuple[str, str]
    one: float = 1.0
    left: float = 190
    scale: Callable[[float], float] = float
    form: str = "{:.1f}"
    label: str = ""

    def place(self, value: float) -> float:
        low, high, at = map(self.scale, (self.ticks[0], self.ticks[-1], value))
        return self.left + (RIGHT - self.left) * (at - low) / (high - low)


def chart(title: str, axis: Axis, groups: Mapping[str, Sequence[Row]], colours: dict[str, str]) -> str:
    """`groups`: rows by the heading above them. `colours`: what each means."""
    top = 22 if axis.label else 0
    bottom = top + 44 + 28 * len(groups) + STEP * sum(map(len, groups.values()))
    drawing = Drawing(title, height=bottom + 28 + STEP * len(colours))
    one = axis.place(axis.one)
    if axis.label:
        drawing.text(0, 16, axis.label, more="small")
    drawing.text(one - 8, top + 16, axis.sides[0], "faint", at="end", more="small")
    drawing.text(one + 8, top + 16, axis.sides[1], "faint", more="small")
    for y in (top + 36, bottom + 16):
        for tick in axis.ticks:
            drawing.text(axis.place(tick), y, axis.form.format(tick), "faint", at="middle", more="small")
    y = top + 44.0
    for heading, members in groups.items():
        drawing.text(0, y + 21, heading, more="strong")
        y += 28
        for tick in axis.ticks:
            x = axis.place(tick)
            drawing.line([(x, y), (x, y + STEP * len(members))], "ink" if tick == axis.one else "line")
        for row in members:
            weight = "small strong" if row.strong else "small"
            drawing.text(0, y + 14, row.label, more=weight)
            drawing.text(WIDTH, y + 14, row.words, at="end", more=weight)
            _values(drawing, axis, row, y + 9.5)
            y += STEP
    for line, (kind, words) in enumerate(colours.items(), 1):
        drawing.legend(0, bottom + 22 + STEP * line, {kind: words})
    return str(drawing)


def _values(drawing: Drawing, axis: Axis, row: Row, y: float) -> None:
    if row.bound:
        drawing.rect(axis.place(row.bound) - 1.5, y - 7, 3, 14, "step", tip=f"{row.label}: bound {row.bound:.2f}")
    y -= 2 * (len(row.dots) - 1)  # so that equal values are both seen
    for kind, (value, *interval) in row.dots.items():
        if interval:
            drawing.line([(axis.place(end), y) for end in interval], kind, more="thick")
        between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        drawing.dot(axis.place(value), y, kind, tip=f"{row.label}: {value:.2f}{between}")
        y += 4
