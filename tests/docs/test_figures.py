"""Figures are drawn from what the library and recorded runs say now, to scale."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import pytest

from bench import quiet
from docs.figures import recorded, versions
from docs.figures.__main__ import TABLES, names
from odc_triton import balance
from odc_triton.base import trace
from tests.docs.svg import committed, found, numbers, redrawn, words

UNIT = 0.011  # widths are rounded to 0.01 units


@pytest.mark.parametrize("name", names())
def test_what_is_committed_is_what_it_would_be_now(name: str) -> None:
    figure = import_module(f"docs.figures.{name}")
    data = figure.data()
    assert ast.literal_eval(repr(data)) == data, "plain data, nothing that draw() could ask"
    if hasattr(figure, "draw"):
        assert figure.draw(data) == committed(name), f"run: python -m docs.figures {name}"
    if hasattr(figure, "table"):
        assert figure.table(data) == (TABLES / f"{name}.md").read_text(encoding="utf-8"), (
            f"run: python -m docs.figures {name}"
        )
    assert hasattr(figure, "draw") or hasattr(figure, "table")


def test_the_records_say_where_they_are_from() -> None:
    assert recorded.RECORDED["command"] == "python -m docs.figures.record"
    assert re.fullmatch("[0-9a-f]{40}", recorded.RECORDED["commit"]), "record again with all changes committed"
    for each in recorded.RECORDED["trained"]["minibatches"].values():
        assert each["waited_for_a_core"] < quiet.MOST_WAITING, "the machine was not quiet: record again"


def _rows(svg: str, *classes: str) -> list[list[dict]]:
    """The boxes of each row, from the top, without keys."""
    boxes = [box for box in found(svg, "rect", *classes) if "key" not in box["class"].split()]
    return [[box for box in boxes if box["y"] == y] for y in sorted({box["y"] for box in boxes}, key=float)]


def _assert_to_scale(svg: str, *tracks: list) -> None:
    """`tracks`: the segments of each row, in seconds, as the library has them. All rows have one scale."""
    rows = _rows(svg)
    assert len(rows) == len(tracks)
    scales = set()
    for boxes, spans in zip(rows, tracks, strict=True):
        seconds = spans[-1][1] - spans[0][0]
        width = sum(numbers(boxes, "width"))
        scales.add(round(width / seconds))
        for state in ("forward", "backward", "wait", "step"):
            drawn = sum(numbers([box for box in boxes if state in box["class"].split()], "width"))
            kinds = (state, trace.UNRECORDED) if state == "wait" else (state,)
            spent = sum(end - start for start, end, kind in spans if kind in kinds)
            # What is shorter than a pixel has joined its neighbour.
            assert drawn == pytest.approx(spent * width / seconds, abs=UNIT * len(boxes) + 2), state
    assert len(scales) == 1


def _segments(minibatch: str, way: str) -> list[list]:
    return list(trace.segments(recorded.events(minibatch, way)).values())


# ---------------------------------------------------------------------- collectives


def test_collectives_to_scale() -> None:
    svg = redrawn("collectives")
    _assert_to_scale(svg, *_segments("few", recorded.THEIRS))
    lines = found(svg, "polyline", "barrier")
    marks = trace.barriers(recorded.events("few", recorded.THEIRS))
    units = [float(line["points"].split(",")[0]) for line in lines]
    start_s, end_s = trace.window_s(recorded.events("few", recorded.THEIRS))
    assert units == pytest.approx([480 * (m.at_s - start_s) / (end_s - start_s) for m in marks], abs=UNIT)
    assert f"FSDP2, one minibatch: {len(marks)} collectives" in words(svg)


# ---------------------------------------------------------------------- a minibatch


def test_minibatch_to_scale() -> None:
    svg = redrawn("minibatch")
    _assert_to_scale(svg, *_segments("few", recorded.OURS))
    assert len(found(svg, "polyline", "barrier")) == 2
    assert [word for word in words(svg) if word.endswith(" barrier")] == ["entry barrier", "exit barrier"]
    packs = recorded.packs("few", recorded.OURS)
    assert len(found(svg, "polyline", "bracket")) == sum(map(len, packs))
    assert sum(int(word.split()[0].replace(",", "")) for word in words(svg) if word.endswith(" tokens")) == 2100


# ---------------------------------------------------------------------- microbatches


def test_microbatches_to_scale() -> None:
    svg = redrawn("microbatches")
    _assert_to_scale(svg, *_segments("many", recorded.THEIRS), *_segments("many", recorded.OURS))
    counts = [len(own) for way in (recorded.THEIRS, recorded.OURS) for own in recorded.packs("many", way)]
    assert len(set(counts[:2])) == 1, "collectives need equal counts"
    assert len(found(svg, "polyline", "bracket")) == sum(counts)
    tokens = [
        int(word.removesuffix(" tokens").replace(",", "")) for word in words(svg) if re.match(r"[\d,]+( tok|$)", word)
    ]
    assert sum(tokens) == 2 * sum(recorded.RECORDED["trained"]["minibatches"]["many"]["lengths"])


def test_microbatches_change_with_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    assign = balance.assign
    monkeypatch.setattr(balance, "assign", lambda *given, **how: [own[::-1] for own in assign(*given, **how)])
    assert words(redrawn("microbatches")) != words(committed("microbatches"))
    monkeypatch.setattr(balance, "assign", lambda *given, **how: assign(*given, **{**how, "balance": "local"}))
    with pytest.raises(ValueError):  # not the microbatches that were recorded
        redrawn("microbatches")


# ---------------------------------------------------------------------- versions


def test_versions_to_scale() -> None:
    svg, data = redrawn("versions"), versions.data()
    assert all(len(set(read)) == 1 for _, _, _, read in recorded.log("read")), "a reader has seen a mix"
    assert not found(svg, "rect", "bad")
    _, *parts = data["owners"].values()
    owned = _rows(svg, "owns")
    for boxes, spans in zip(owned, data["owners"].values(), strict=True):
        per_s = numbers(boxes, "width")[1] / (spans[1][1] - spans[1][0])
        assert numbers(boxes, "width") == pytest.approx([per_s * (end - start) for start, end, _ in spans], rel=2e-3)
    assert len(owned) == 1 + len(parts) == 3
    lines = [float(line["points"].split(",")[0]) for line in found(svg, "polyline", "barrier")]
    for boxes in owned:  # each owner steps and publishes between the barriers
        assert lines[0] < float(boxes[1]["x"]) < float(boxes[2]["x"]) < lines[1]
    for boxes, spans in zip(_rows(svg, "reads"), recorded.versions_read().values(), strict=True):
        per_s = (float(boxes[1]["x"]) - float(boxes[0]["x"])) / (spans[1][0] - spans[0][0])
        assert numbers(boxes, "width") == pytest.approx([per_s * (end - start) for start, end, _ in spans], rel=1e-3)


# ---------------------------------------------------------------------- a death


def test_death_to_scale() -> None:
    svg = redrawn("death")
    (killed_s,) = (at_s for at_s, *_ in recorded.log("killed"))
    first_s = {rank: at_s for at_s, rank, _, (_, alive) in recorded.log("alive")[::-1] if not alive}
    assert sorted(first_s) == [0, 2]
    kill = float(found(svg, "polyline", "kill")[0]["points"].split(",")[0])
    dots = found(svg, "circle", "bad")
    later = [float(dot["cx"]) - kill for dot in dots]
    assert later[0] / later[1] == pytest.approx((first_s[0] - killed_s) / (first_s[2] - killed_s), rel=1e-3)
    for rank, at_s in first_s.items():
        assert f"{1e3 * (at_s - killed_s):.0f} ms" in words(svg)
        error = next(text for _, own, _, text in recorded.log("error") if own == rank)
        assert "RankLost" in error
        assert "rank 1 died" in error
        assert error in [dot["words"] for dot in dots]
    victim = _rows(svg)[recorded.RECORDED["killed"]["victim"]]
    assert float(victim[-1]["x"]) + float(victim[-1]["width"]) == pytest.approx(kill, abs=UNIT)
