"""The first page's two figures: the demo's timelines to one scale, and its losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.figures import first_page, losses
from tests.docs.svg import committed, found

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def _rows(svg: str) -> dict[float, float]:
    """How wide the boxes of a rank's row are together, by the row's y."""
    rows: dict[float, float] = {}
    for box in found(svg, "rect"):
        if "key" not in box["class"].split():
            rows[float(box["y"])] = rows.get(float(box["y"]), 0.0) + float(box["width"])
    return rows


def test_both_ways_are_drawn_to_one_scale() -> None:
    trace = first_page.tracks_of(json.loads((RESULTS / "demo_trace.json").read_text()))
    report = json.loads((RESULTS / "demo.json").read_text())
    seconds = [
        max(event.end_s for event in trace[name]) - min(event.start_s for event in trace[name])
        for name in (report["speedup_split_vs_fsdp2"]["name"], first_page.OURS)
    ]
    widths = [width for _, width in sorted(_rows(committed("first_page")).items())]
    scale = widths[0] / seconds[0]
    # Each box is rounded to 0.01 units; a row has fewer than 200.
    assert widths == pytest.approx([scale * each for each in seconds for _ in range(2)], abs=2)
    assert max(widths) > 0.8 * first_page.WIDTH


def test_what_is_played_ends_within_8_seconds_and_stands_still_where_less_motion_is_asked_for() -> None:
    style = committed("first_page").partition("</style>")[0]
    assert "animation:grow 6s linear 1 both" in style
    assert "prefers-reduced-motion:reduce){.figure .played{animation:none}" in style
    assert committed("first_page").count('class="played"') == 1


def test_losses_are_the_demos_point_by_point() -> None:
    report = json.loads((RESULTS / "demo.json").read_text())
    theirs, ours = (
        each["points"].split() for each in found(committed("losses"), "polyline") if len(each["points"]) > 99
    )
    for line, name in ((theirs, report["speedup_split_vs_fsdp2"]["name"]), (ours, losses.OURS)):
        values = report["losses"][name]
        heights = [float(point.split(",")[1]) for point in line]
        per_unit = (values[0] - min(values)) / (max(heights) - heights[0])
        assert [values[0] - per_unit * (y - heights[0]) for y in heights] == pytest.approx(values, abs=0.001)
    changed = losses.data()
    changed["ODC"][7] += 1.0
    assert losses.draw(changed) != committed("losses")
