"""The report against brute force: time sampled by cells, pictures read by pixels, pages parsed."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from odc_triton.base.events import BUSY_KINDS, Event
from odc_triton.base.files import write_file
from odc_triton.base.report import (
    COLOURS,
    Curves,
    Texts,
    curve_figure,
    save_html,
    save_timeline,
    table,
    timeline_figure,
)
from odc_triton.base.trace import (
    STATES,
    UNRECORDED,
    chrome_trace,
    excerpt,
    headline,
    idle_fraction,
    meetings,
    save_trace,
    seconds_text,
    segments,
    shares,
    timeline_text,
    whole,
    window_s,
)


def span(rank, kind, start_s, end_s, minibatch=0, microbatch=-1, label=""):
    return Event(
        rank=rank,
        kind=kind,
        start_s=start_s,
        end_s=end_s,
        minibatch=minibatch,
        microbatch=microbatch,
        label=label,
    )


def odc_like(minibatches=2, start_s=50.0):
    """Rank 0 works 3 s of each 4, then waits 1 s; both meet at 4 s, step until 4.5 s, and meet again."""
    events = []
    for minibatch in range(minibatches):
        t = start_s + 5 * minibatch
        for rank, busy_s in ((0, 3.0), (1, 4.0)):
            events += [
                span(rank, "forward", t, t + 1, minibatch, 0),
                span(rank, "backward", t + 1, t + busy_s, minibatch, 0),
                span(rank, "accumulate", t + 1.5, t + 2, minibatch, 0),
                span(rank, "wait", t + busy_s, t + 4, minibatch, label="gradients landed"),
                span(rank, "step", t + 4, t + 5, minibatch),
                span(rank, "wait", t + 5, t + 5, minibatch, label="parameters readable"),
            ]
    return events


# Spans on a grid of whole seconds: a sample in the middle of every cell then measures time exactly.
cells = st.integers(0, 12)
spans = st.builds(
    lambda rank, kind, ends, minibatch: span(rank, kind, float(min(ends)), float(max(ends)), minibatch),
    st.integers(0, 2),
    st.sampled_from((*BUSY_KINDS, "wait")),
    st.tuples(cells, cells),
    st.integers(0, 2),
)


def state_at(events, rank, time_s):
    over = [e for e in events if e.rank == rank and e.start_s < time_s < e.end_s]
    if any(e.kind == "wait" for e in over):
        return {"wait"}
    if not over:
        return {UNRECORDED}
    innermost = max((e.start_s, -e.end_s) for e in over)
    return {e.kind for e in over if (e.start_s, -e.end_s) == innermost}


@settings(max_examples=300, deadline=None)
@given(st.lists(spans, min_size=1, max_size=12))
def test_segments_and_idle_fraction_equal_sampled_time(events):
    start_s, end_s = window_s(events)
    ranks = segments(events)
    assert list(ranks) == sorted({event.rank for event in events})
    idle = 0
    for rank, flat in ranks.items():
        reached_s = start_s
        for segment in flat:
            assert segment.start_s == reached_s < segment.end_s
            reached_s = segment.end_s
        assert reached_s == end_s
        for cell in range(int(start_s), int(end_s)):
            states = state_at(events, rank, cell + 0.5)
            assert next(s.state for s in flat if s.start_s < cell + 0.5 < s.end_s) in states
            idle += bool(states & {"wait", UNRECORDED})
    cells_of_all = (end_s - start_s) * len(ranks)
    assert idle_fraction(events) == pytest.approx(idle / cells_of_all if cells_of_all else 0.0)


def test_idle_fraction_of_a_known_minibatch():
    assert idle_fraction(odc_like(3)) == pytest.approx(1 / 10)
    within = [span(0, "backward", 0, 10), span(0, "wait", 2, 4), span(0, "accumulate", 5, 6)]
    assert idle_fraction(within) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="0 events"):
        idle_fraction([])


@settings(max_examples=100, deadline=None)
@given(st.lists(spans, min_size=1, max_size=12), st.integers(1, 9))
def test_shares_equal_overlap_summed_by_hand(events, columns):
    start_s, end_s = window_s(events)
    edges_s = np.linspace(start_s, end_s + 1, columns + 1)
    for flat in segments(events).values():
        part = shares(flat, edges_s)
        assert set(part) == set(STATES)
        for column, (left_s, right_s) in enumerate(pairwise(edges_s)):
            expected = Counter()
            for s in flat:
                expected[s.state] += max(0.0, min(right_s, s.end_s) - max(left_s, s.start_s))
            for state in STATES:
                assert part[state][column] == pytest.approx(expected[state] / (right_s - left_s), abs=1e-9)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=50))
def test_whole_numbers_lose_no_area(amounts):
    rounded = whole(np.array(amounts))
    assert rounded.dtype.kind == "i"
    assert np.all(np.abs(np.cumsum(rounded) - np.cumsum(amounts)) <= 0.5 + 1e-9)


def test_meetings_need_all_ranks_at_one_moment():
    assert [(m.at_s, m.minibatch, m.microbatch) for m in meetings(odc_like(1))] == [
        (54.0, 0, -1),
        (55.0, 0, -1),
    ]
    alone = [event for event in odc_like(1) if event.rank == 0]
    assert meetings(alone) == []
    absent = [span(0, "wait", 0, 1, label="peer"), span(1, "forward", 0, 1)]
    assert meetings(absent) == []
    apart = [span(0, "wait", 0, 1, label="peer"), span(1, "wait", 2, 3, label="peer")]
    assert meetings(apart) == []
    locks = [span(rank, "wait", 0, 1, label="lock of wte.weight") for rank in (0, 1)]
    assert meetings(locks) == []
    own_bytes = [span(rank, "wait", 0, 1, label="gather") for rank in (0, 1)]
    assert meetings(own_bytes) == []
    # The second layer's wait of rank 0 pairs with the second of rank 1, though their labels are the same.
    layers = [span(r, "wait", t + late, t + 1, 0, 3, "layer") for r, late in ((0, 0.0), (1, 0.5)) for t in (1, 5)]
    assert [(m.at_s, m.microbatch) for m in meetings(layers)] == [(1.5, 3), (5.5, 3)]


def test_excerpt_cuts_pauses_but_no_idle_time():
    first = odc_like(1, start_s=10.0)
    second = [span(e.rank, e.kind, e.start_s + 90, e.end_s + 90, 1, e.microbatch, e.label) for e in first]
    third = [span(0, "forward", 300, 301, 2)]
    chosen = excerpt({"a": [*third, *second, *first]}, minibatches=range(2))["a"]
    expected = odc_like(2, start_s=0.0)
    assert set(chosen) == set(expected)
    assert idle_fraction(chosen) == pytest.approx(idle_fraction(first))
    with pytest.raises(ValueError, match=r"'a' has no event.*\[0\]"):
        excerpt({"a": first}, minibatches=[7])


def test_excerpt_keeps_minibatches_that_overlap_in_time_as_they_are():
    events = [span(0, "step", 5, 8, 0), span(1, "step", 5, 6, 0), span(1, "forward", 6, 9, 1)]
    moved = excerpt({"a": events}, minibatches=(0, 1))["a"]
    assert sorted((e.start_s, e.end_s) for e in moved) == [(0, 1), (0, 3), (1, 4)]


def test_seconds_text():
    values = {4.4: "4.40 s", 0.0123: "12.3 ms", 123.4: "123 s", 1234.5: "1,234 s", 5e-5: "50.0 µs", 0: "0 s"}
    assert {value: seconds_text(value) for value in values} == values


def test_headline():
    assert headline(odc_like(2)) == ("10.0 s", "10.0% idle", "2 meetings per minibatch")


def test_timeline_text_shows_busy_idle_and_lengths():
    tracks = {"short": odc_like(1), "long": odc_like(2, start_s=7.0)}
    lines = timeline_text(tracks, width=107).splitlines()
    assert lines[0] == "short: 5.00 s, 10.0% idle, 2 meetings per minibatch"
    assert lines[1] == "rank 0 " + "#" * 30 + "." * 10 + "#" * 10
    assert lines[2] == "rank 1 " + "#" * 50
    assert lines[4] == "rank 0 " + ("#" * 30 + "." * 10 + "#" * 10) * 2
    with pytest.raises(ValueError, match="5 characters"):
        timeline_text(tracks, width=5)
    with pytest.raises(ValueError, match="0 tracks"):
        timeline_text({})


def thin_waits(count, idle):
    """A rank that waits the share `idle` of every one of `count` layers, and one that always works."""
    events = [span(0, "forward", 0, count), span(1, "forward", 0, count)]
    return events + [span(0, "wait", i + 1 - idle, i + 1, label="layer") for i in range(count)]


@pytest.mark.parametrize("idle", [0.02, 0.3, 0.85])
def test_waits_thinner_than_a_character_or_pixel_keep_their_area(idle):
    tracks = {"a": thin_waits(20_000, idle)}
    row = timeline_text(tracks, width=107).splitlines()[1].removeprefix("rank 0 ")
    assert row.count(".") == pytest.approx(idle * 100, abs=1)
    pixels = painting(timeline_figure(tracks))
    red, pale = area(pixels, "wait"), area(pixels, "forward")
    assert red / (red + pale) == pytest.approx(idle / 2, rel=0.01)


def painting(figure):
    return figure.axes[0].images[0].get_array()


def area(pixels, state):
    return int((pixels == list(bytes.fromhex(COLOURS[state][0][1:]))).all(axis=-1).sum())


def test_timeline_areas_are_proportional_to_time():
    tracks = {"a": odc_like(2)}
    pixels = painting(timeline_figure(tracks))
    seconds = {"wait": 2, "forward": 4, "backward": 8, "accumulate": 2}
    # Meetings are drawn over the bars, a few columns wide; the step's colour is compared with theirs nowhere.
    per_second = area(pixels, "forward") / seconds["forward"]
    assert per_second == pytest.approx(52 * pixels.shape[1] / 10, rel=0.03)
    for state, value in seconds.items():
        assert area(pixels, state) == pytest.approx(value * per_second, rel=0.03), state


def test_variants_share_an_axis_that_starts_at_their_own_zero():
    figure = timeline_figure({"one": odc_like(1, start_s=3.0), "two": odc_like(2, start_s=900.0)})
    assert "seconds from each variant's own start" in {text.get_text() for text in figure.axes[0].texts}
    pixels = painting(figure)
    blue = (pixels == list(bytes.fromhex(COLOURS["forward"][0][1:]))).all(axis=-1)
    columns = pixels.shape[1]
    first, second = np.array_split(blue, 2)
    assert first[:, 0].any()
    assert second[:, 0].any()
    white = (pixels[: len(first)] == 255).all(axis=-1).all(axis=0)
    assert white[columns // 2 + 4 :].all()
    assert not white[: columns // 2].any()


def test_many_ranks_and_every_state_are_drawn():
    kinds = (*BUSY_KINDS, "wait")
    tracks = {"a": [span(r, k, i, i + 1.0) for r in range(64) for i, k in enumerate(kinds)]}
    tracks["a"].append(span(0, "step", 9, 10))
    figure = timeline_figure(tracks, title="Five % of $5")
    assert all(area(painting(figure), state) for state in STATES)
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"rank 0", "rank 63", "a", "10.0 s", "Five % of $5", "seconds from its start"} <= words
    assert "rank 30" not in words
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [*(words for _, words in reversed(COLOURS.values())), "all ranks meet"]
    assert set(COLOURS) == set(STATES)


def test_save_timeline_is_a_png_of_2400_pixels(tmp_path):
    save_timeline({r"bad $\frac$ & <b>": odc_like(1)}, tmp_path / "t.png")
    assert imread(tmp_path / "t.png").shape[1] == 2400
    assert os.listdir(tmp_path) == ["t.png"]
    with pytest.raises(ValueError, match="0 tracks"):
        save_timeline({}, tmp_path / "u.png")


def test_chrome_trace_nests_names_and_units(tmp_path):
    tracks = {"FSDP2": odc_like(1, start_s=1e5 + 1 / 3), "ODC": odc_like(2)}
    tracks["ODC"].insert(0, span(0, "accumulate", 51.0, 51.25))  # starts with its backward
    save_trace(tracks, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(tracks)
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names["process_name", 1, 1] == {"name": "FSDP2"}
    assert names["process_name", 2, 1] == {"name": "ODC"}
    assert names["thread_name", 2, 2] == {"name": "rank 1"}
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == sum(map(len, tracks.values()))
    assert min(e["ts"] for e in complete if e["pid"] == 1) == 0
    step = next(e for e in complete if e["pid"] == 2 and e["tid"] == 2 and e["name"] == "step")
    assert (step["ts"], step["dur"], step["cat"], step["args"]["minibatch"]) == (4e6, 1e6, "busy", 0)
    # A viewer keeps a stack per thread: every span must end before the one around it does.
    for lane in {(e["pid"], e["tid"]) for e in complete}:
        stack = []
        for e in (e for e in complete if (e["pid"], e["tid"]) == lane):
            start_ns, end_ns = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)
            while stack and stack[-1] <= start_ns:
                stack.pop()
            assert not stack or end_ns <= stack[-1]
            stack.append(end_ns)


def test_table_is_aligned_and_escaped():
    rows = [("a|b", 12345.678, 0.12345, None), ("c\nd", 7, float("nan"), "1.2× (1.1–1.3)")]
    text = table(rows, ("name", "tokens", "idle", "ratio"))
    assert text.splitlines() == [
        "| name | tokens |   idle |          ratio |",
        "| ---- | -----: | -----: | -------------: |",
        "| a\\|b | 12,346 | 0.1235 |              – |",
        "| c d  |      7 |    nan | 1.2× (1.1–1.3) |",
    ]
    assert table([], ("a",)) == "| a   |\n| --- |"
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2 columns"):
        table([(1, 2), (3,)], ("a", "b"))
    with pytest.raises(ValueError, match="0 columns"):
        table([], ())


class Page(HTMLParser):
    """Parses a page strictly: every element closed in order, every attribute known."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.sources, self.alts = [], Counter(), [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert {name for name, _ in attributes} <= {
            *("lang", "charset", "name", "content", "http-equiv", "class", "scope", "alt", "src")
        }
        self.tags[tag] += 1
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)
        self.sources += [value for name, value in attributes if name == "src"]
        self.alts += [value for name, value in attributes if name == "alt"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


HOSTILE = """<script>alert("x")</script> & 'y' $\\frac$"""


def test_html_is_one_valid_page_with_everything_escaped(tmp_path):
    path = tmp_path / "report.html"
    save_html(
        path,
        title=HOSTILE,
        summary=f"ODC won.\n\n{HOSTILE}",
        rows=[(HOSTILE, 1.5)],
        columns=(f"head {HOSTILE}", "ratio"),
        tracks={HOSTILE: odc_like(1), "_b": odc_like(2)},
        curves=[
            Curves(title=HOSTILE, label=HOSTILE, values={HOSTILE: [3.0, 2.0], "_b": [3.0, float("nan")], "none": []})
        ],
        facts={f"fact {HOSTILE}": HOSTILE},
    )
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    page = Page(text)
    assert page.tags["script"] == page.tags["link"] == 0
    assert page.tags["p"] == 2
    assert (page.tags["tr"], page.tags["th"], page.tags["td"], page.tags["dt"]) == (2, 2, 2, 1)
    assert page.texts.count(HOSTILE) == 6  # title, heading, paragraph, cell, heading of the curves, fact
    assert "5.00 s, 10.0% idle" in page.alts[0]
    assert not re.search(r"(?i)https?://|@import|url\(", text)
    assert len(page.sources) == 2
    for source in page.sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert imread(io.BytesIO(base64.b64decode(data, validate=True))).shape[1] == 2400


def test_html_leaves_out_what_is_empty(tmp_path):
    parts = {"rows": [], "columns": (), "tracks": {}, "curves": [], "facts": {}}
    save_html(tmp_path / "r.html", title="t", summary="s", **parts)
    page = Page((tmp_path / "r.html").read_text())
    assert not {"img", "table", "dl", "h2"} & set(page.tags)


def test_curve_figure_draws_every_value_and_name():
    axes = curve_figure(
        Curves(title="Loss $", label="per token", values={"_a": [3.0, 2.0, 1.0], "$b": [3.0, 2.5]})
    ).axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[3, 2, 1], [3, 2.5]]
    assert axes.lines[0].get_linewidth() > axes.lines[1].get_linewidth()
    assert [t.get_text().lstrip("\u200b") for t in axes.get_legend().get_texts()] == ["_a", "$b"]
    assert (axes.get_title(loc="left"), axes.get_ylabel()) == ("Loss $", "per token")


def test_values_between_gaps_are_dots_and_names_stay_on_the_picture():
    names = ("FSDP2 no reshard + LB-Mini", "evaluation")
    figure = curve_figure(
        Curves(title="Loss", label="", values=dict(zip(names, ([3.0, 2.0], [float("nan"), 2.5]), strict=True)))
    )
    assert [line.get_marker() for line in figure.axes[0].lines] == ["None", "o"]
    figure.draw_without_rendering()
    box = figure.axes[0].get_legend().get_window_extent()
    assert figure.axes[0].bbox.x1 <= box.x0 < box.x1 <= figure.bbox.x1


def test_write_file_replaces_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_write_file_names_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; create it"):
        write_file(tmp_path / "missing" / "f", b"")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        write_file(tmp_path / "file" / "f", b"")
    with pytest.raises(IsADirectoryError, match="add a file name"):
        write_file(tmp_path, b"")

    # Tests may run as root, whom no mode bits stop.
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match=r"no permission .*choose another folder"):
        write_file(tmp_path / "f", b"")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "odc-triton\[plot\]"'):
        save_timeline({"a": odc_like(1)}, tmp_path / "t.png")
    assert os.listdir(tmp_path) == []
    assert timeline_text({"a": odc_like(1)})


def test_import_needs_neither_torch_nor_matplotlib_and_drawing_no_pyplot(tmp_path):
    code = """
import sys
from odc_triton.base import report, trace
from odc_triton.base.events import Event
assert not {"torch", "triton", "transformers", "matplotlib"} & set(sys.modules)
event = Event(rank=0, kind="step", start_s=0.0, end_s=1.0, minibatch=0)
report.save_timeline({"a": [event]}, sys.argv[1])
assert not {"torch", "matplotlib.pyplot"} & set(sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "t.png")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "t.png").exists()


def test_texts_are_escaped_and_keep_their_lines(tmp_path: Path) -> None:
    texts = Texts(title="a & b", columns=["<i>"], rows=[["<script>x</script>\n y"], [None]])
    none = {"rows": [], "columns": [], "tracks": {}, "curves": [], "facts": {}}
    save_html(tmp_path / "r.html", title="t", summary="s", texts=texts, **none)
    page = (tmp_path / "r.html").read_text()
    assert '<td class="text">&lt;script&gt;x&lt;/script&gt;\n y</td>' in page
    assert "<h2>a &amp; b</h2>" in page
    assert '<th class="text">&lt;i&gt;</th>' in page
    assert '<td class="text"></td>' in page
