"""The first page's figure: the demo's minibatches under the faster FSDP2 and under both of ours, to one scale."""

from __future__ import annotations

from collections import defaultdict

from odc_triton.base.events import Event
from odc_triton.jobs.reports.trace import window_s

from .results import read
from .svg import Drawing
from .timeline import paint, present, rows_of

WIDTH, LEFT, BAR = 500, 50, 20
TRACKS = ("ODC + LB-Mini", "ODC + split")
OURS = {"ODC": "speedup_vs_fastest", "ODC + split samples": "speedup_split_vs_fsdp2"}


def data() -> dict:
    """Of each way: rows of (start, end, state) in seconds, how many steps in how long, and the speed-up over all."""
    report = read("demo.json")
    tracks = tracks_of(read("demo_trace.json"))
    theirs = report["speedup_vs_fastest"]["name"]
    names = {f"FSDP2{' without resharding' * ('no reshard' in theirs)}": (theirs, None)}
    names |= {words: (name, report[key]["ratio"]) for (words, key), name in zip(OURS.items(), TRACKS, strict=True)}
    found = {}
    for way, (name, ratio) in names.items():
        events = tracks[name]
        start_s, end_s = window_s(events)
        rows = rows_of(events, least_s=(end_s - start_s) / WIDTH)
        steps = len({event.minibatch for event in events})
        found[way] = {
            "rows": rows,
            "seconds": end_s - start_s,
            "steps": steps,
            "of": report["minibatches"],
            "ratio": ratio,
        }
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
    title = "Four steps on two ranks: FSDP2 waits most, ODC less, and ODC with split samples ends first"
    drawing = Drawing(title, width=WIDTH, height=300)
    per_s = (WIDTH - LEFT - 8) / max(way["seconds"] for way in data.values())
    y = 34.0
    for name, way in data.items():
        top = y
        y = paint(drawing, way["rows"], x=LEFT, y=y, per_s=per_s, height=BAR) + 40
        drawing.text(0, top - 10, name, more="strong")
        words = f"these {way['steps']} steps: {way['seconds']:.2f} s"
        words += "" if way["ratio"] is None else f"; all {way['of']}: {way['ratio']:.2f} times as fast"
        drawing.text(WIDTH - 8, top - 10, words, at="end", more="small")
        for rank in way["rows"]:
            drawing.text(0, top + rank * (BAR + 4) + 16, f"rank {rank}", "faint", more="small")
    drawing.legend(LEFT, y - 8, present(*(way["rows"] for way in data.values())))
    return str(drawing)
