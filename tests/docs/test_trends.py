"""The simulator's figure: a curve is where its numbers are."""

from __future__ import annotations

import copy
import re

import pytest

from docs.figures import trends


def curves(svg: str) -> list[list[float]]:
    """The speed-ups of each curve, read from its heights, between the lines at 1 and at 2."""
    grid = [float(y) for y in re.findall(r'<polyline class="line" points="[\d.]+,([\d.]+)', svg)]
    thick = re.findall(r'<polyline class="rank\d thick[^"]*" points="([^"]*)"', svg)
    panels = [(grid[i], grid[i + 2]) for i in range(0, len(grid), 3)]
    found = []
    for number, points in enumerate(thick[: 3 * len(panels)]):
        low, high = panels[number // 3]
        found.append([1 + (low - float(point.split(",")[1])) / (low - high) for point in points.split()])
    return found


def test_a_curve_is_where_its_numbers_are() -> None:
    data = trends.data()
    wanted = [[row[curve] for row in data[panel]] for panel in trends.PANELS for curve in trends.CURVES]
    for found, values in zip(curves(trends.draw(data)), wanted, strict=True):
        assert found == pytest.approx(values, abs=1e-3)  # two decimals of a unit
    changed = copy.deepcopy(data)
    changed["GPUs"][2]["split"] = 1.5
    assert curves(trends.draw(changed))[3][2] == pytest.approx(1.5, abs=1e-3)
