"""The first page's figure: the demo's minibatches under the faster FSDP2 and under ours, to one scale."""

from __future__ import annotations

from collections import defaultdict

from odc_triton.base.events import Event
from odc_triton.jobs.reports.trace import idle_fraction, window_s

from .results import read
from .svg import Drawing
from .timeline import paint, present, rows_of

OURS = "ODC + split"
WIDTH, LEFT, BAR = 520, 50, 22


def data() -> dict:
    """Of both ways: rows of (start, end, state) in seconds, how many steps in how long, and the idle share."""
    report = read("demo.json")
    tracks = tracks_of(read("demo_trace.json"))
    theirs = report["speedup_split_vs_fsdp2"]["name"]
    found = {}
    setting = "without resharding" if "no reshard" in theirs else "with its defaults"
    for way, name in ((f"FSDP2 {setting}", theirs), ("ODC, long samples split", OURS)):
        events = tracks[name]
        start_s, end_s = window_s(events)
        rows = rows_of(events, least_s=(end_s - start_s) / WIDTH)
        steps = len({event.minibatch for event in events})
        found[way] = {"rows": rows, "seconds": end_s - start_s, "steps": steps, "idle": idle_fraction(events)}
    return found


def tracks_of(trace: dict) -> dict[str, list[Event]]:
    """The tracks of what `odc_triton.jobs.reports.trace.save_trace` wrote, each from 0 s on."""
    names, tracks = {}, defaultdict(list)
    for each in trace["traceEvents"]:
        if each["name"] == "process_name":
            names[each["pid"]] = each["args"]["name"]
        elif each["ph"] == "X":
            start_s, end_s = each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6
            about = {"rank": each["tid"] - 1, "kind": each["name"], **each["args"]}
            tracks[names[each["pid"]]].append(Event(start_s=start_s, end_s=end_s, **about))
    return tracks


def draw(data: dict) -> str:
    title = "Two ranks over time: FSDP2’s wait in the layers; ODC’s, with long samples split, wait less and end sooner"
    drawing = Drawing(title, width=WIDTH, height=224)
    per_s = (WIDTH - LEFT - 8) / max(way["seconds"] for way in data.values())
    tops = {}
    with drawing.played():
        y = 34.0
        for name, way in data.items():
            tops[name] = y
            y = paint(drawing, way["rows"], x=LEFT, y=y, per_s=per_s, height=BAR) + 42
    for name, way in data.items():
        drawing.text(0, tops[name] - 10, name, more="strong")
        words = f"{way['steps']} steps in {way['seconds']:.2f} s, {way['idle']:.0%} idle"
        drawing.text(WIDTH - 8, tops[name] - 10, words, at="end")
        for rank in way["rows"]:
            drawing.text(0, tops[name] + rank * (BAR + 4) + 18, f"rank {rank}", "faint", more="small")
    drawing.legend(LEFT, y - 8, present(*(way["rows"] for way in data.values())))
    return str(drawing)
