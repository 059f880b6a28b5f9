"""The report: images read by pixels, pages parsed."""

from __future__ import annotations

import base64
import html
import io
import os
import re
import sys
from collections import Counter

import pytest
from matplotlib.image import imread

from odc_triton.base.events import ELSEWHERE
from odc_triton.jobs.reports.report import (
    COLOURS,
    Curves,
    curves_part,
    facts_part,
    save_html,
    save_timeline,
    table,
    table_part,
    text_part,
    timeline_figure,
    timelines_part,
)
from odc_triton.jobs.reports.trace import chrome_trace
from tests.support.timelines import odc_like, span


def painting(figure, track=0):
    return figure.axes[track].images[0].get_array()


def test_what_runs_elsewhere_is_drawn_beside_what_the_rank_does():
    """A server samples from 0 to 3 s, and the rank computes from 1 to 4 s; in the trace each has a thread."""
    events = [
        span(0, "rollout", 0.0, 3.0, label=ELSEWHERE + "2 prompts"),
        span(0, "forward", 1.0, 4.0, microbatch=0),
        span(1, "forward", 0.0, 4.0, microbatch=0),
    ]
    pixels = painting(timeline_figure({"overlapped": events}))
    colours = {kind: tuple(bytes.fromhex(COLOURS[kind][0][1:])) for kind in ("rollout", "forward")}
    columns, height = pixels.shape[1], pixels.shape[0] // 2
    for second, upper, lower in ((0.5, "rollout", "rollout"), (2.0, "rollout", "forward"), (3.5, "forward", "forward")):
        at = round(columns * second / 4)
        assert tuple(pixels[1, at]) == colours[upper]
        assert tuple(pixels[height // 2, at]) == colours[lower]
        assert tuple(pixels[height + 1, at]) == colours["forward"]
    found = chrome_trace({"": events})["traceEvents"]
    threads = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    spans = [(each["name"], threads[each["tid"]]) for each in found if each["ph"] == "X"]
    assert sorted(spans) == [("forward", "rank 0"), ("forward", "rank 1"), ("rollout", "rank 0, elsewhere")]


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


HOSTILE = """<script>alert("x")</script> & 'y' $\\frac$"""


def tags_of(page):
    """How often each tag opens, all of which are closed again."""
    opened, closed = Counter(re.findall(r"<(\w+)", page)), Counter(re.findall(r"</(\w+)>", page))
    assert {tag for tag in opened if opened[tag] != closed[tag]} <= {"meta", "img"}
    return opened


def test_html_is_one_page_with_everything_escaped(tmp_path):
    path = tmp_path / "report.html"
    save_html(
        path,
        title=HOSTILE,
        parts=[
            text_part(f"ODC won.\n\n{HOSTILE}"),
            table_part([(HOSTILE, 1.5)], (f"head {HOSTILE}", "ratio"), heading=HOSTILE),
            timelines_part({HOSTILE: odc_like(1), "_b": odc_like(2)}),
            curves_part(Curves(title=HOSTILE, label=HOSTILE, values={HOSTILE: [3.0, 2.0], "_b": [3.0, float("nan")]})),
            facts_part(f"facts {HOSTILE}", {f"fact {HOSTILE}": f"{HOSTILE}\nrun `{HOSTILE}`"}),
            facts_part(f"more {HOSTILE}", {"fact": "value"}, folded=True),
            *(table_part([], ("a",)), timelines_part({}), facts_part("none", {}), facts_part("none", {}, folded=True)),
        ],
    )
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>\n<html lang=")
    wanted = {"p": 2, "tr": 2, "th": 2, "td": 2, "dt": 2, "dd": 3, "code": 1, "img": 2, "script": 0}
    tags = tags_of(page)
    assert {tag: tags[tag] for tag in wanted} == wanted
    # Title, heading, paragraph, heading, head, cell, title of curves, facts, fact, its two lines, more facts; words of
    # images: one and two.
    assert page.count(html.escape(HOSTILE)) == 12 + 1 + 2
    assert "none" not in page.replace("'none'", "")
    assert "5.00 s, 10.0% idle" in page
    assert not re.search(r"(?i)https?://|@import|url\(", page)
    sources = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert [imread(io.BytesIO(base64.b64decode(data, validate=True))).shape[1] for data in sources] == [2400, 2400]


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "odc-triton\[plot\]"'):
        save_timeline({"a": odc_like(1)}, tmp_path / "t.png")
    assert os.listdir(tmp_path) == []
