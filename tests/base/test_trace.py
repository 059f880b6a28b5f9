"""Times of a recorded job against brute force: time sampled by cells, spans nested on a stack."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.base.events import BUSY_KINDS
from odc_triton.jobs.reports.trace import (
    STATES,
    UNRECORDED,
    barriers,
    idle_fraction,
    save_trace,
    segments,
    shares,
    timeline_text,
    window_s,
)
from tests.support.timelines import odc_like, span

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


@settings(max_examples=300)
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


@settings(max_examples=100)
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


def test_barriers_need_all_ranks_at_one_moment():
    assert [(m.at_s, m.minibatch, m.microbatch) for m in barriers(odc_like(1))] == [(54.0, 0, -1), (55.0, 0, -1)]
    for none in (
        [event for event in odc_like(1) if event.rank == 0],
        [span(0, "wait", 0, 1, label="peer"), span(1, "forward", 0, 1)],
        [span(0, "wait", 0, 1, label="peer"), span(1, "wait", 2, 3, label="peer")],
        *([span(rank, "wait", 0, 1, label=label) for rank in (0, 1)] for label in ("lock of wte.weight", "gather")),
    ):
        assert barriers(none) == []
    # The second layer's wait of rank 0 pairs with the second of rank 1, though their labels are the same.
    layers = [span(r, "wait", t + late, t + 1, 0, 3, "layer") for r, late in ((0, 0.0), (1, 0.5)) for t in (1, 5)]
    assert [(m.at_s, m.microbatch) for m in barriers(layers)] == [(1.5, 3), (5.5, 3)]


def test_timeline_text_shows_busy_idle_and_lengths():
    tracks = {"short": odc_like(1), "long": odc_like(2, start_s=7.0)}
    lines = timeline_text(tracks, width=107).splitlines()
    assert lines[0] == "short: 5.00 s, 10.0% idle, 2 barriers per step"
    assert lines[1] == "rank 0 " + "#" * 30 + "." * 10 + "#" * 10
    assert lines[2] == "rank 1 " + "#" * 50
    assert lines[4] == "rank 0 " + ("#" * 30 + "." * 10 + "#" * 10) * 2


def test_chrome_trace_nests_names_and_units(tmp_path):
    tracks = {"FSDP2": odc_like(1, start_s=1e5 + 1 / 3), "ODC": odc_like(2)}
    tracks["ODC"].insert(0, span(0, "publish", 51.0, 51.25))  # starts with its backward
    save_trace(tracks, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}
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
