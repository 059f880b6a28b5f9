"""The page "Try lengths like yours": its choices simulated, as data for _static/lengths.js and as a table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from odc_triton.base.events import Event
from odc_triton.jobs.reports.trace import UNRECORDED, segments, window_s
from odc_triton.tools.simulate.hardware import find_device
from odc_triton.tools.simulate.models import Model
from odc_triton.tools.simulate.study import cells, make_job, named_lengths, rank_settings, usual_links

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE, PLACE = "lengths", '<div id="lengths"></div>'
SCRIPTS = "".join(f'<script src="_static/{name}.js" defer></script>\n' for name in ("lengths_data", "lengths"))
LENGTHS = {"chat": "chat", "longalign": "LongAlign", "swe-smith": "SWE-Smith", "aime": "AIME"}
RANKS, SAMPLES = (2, 4, 8, 16), (1, 2, 4, 8)
MODEL, GPU = "qwen2.5-7b", "h200"
OURS = ("ODC + LB-Mini", "ODC + LB-Split")
WIDTH = 700  # of a timeline, in pixels
HEAD = "| lengths | ranks | samples | FSDP2's faster setting | s | idle | LB-Mini, s | idle | split, s | idle |"


def command(name: str, ranks: int, samples: int) -> str:
    """Prints the numbers of that cell."""
    options = f"--lengths {name} --model {MODEL} --gpu {GPU} \\\n    --gpus {ranks} --minibatch {samples}"
    return f"odc-triton simulate {options} --split-sequences"


def merged(spans: Iterable[tuple[str, float]], least_s: float) -> list[tuple[str, float]]:
    """(state, seconds) in order. What is shorter than `least_s` joins the next of its state: each state's sum stays."""
    held: dict[str, float] = defaultdict(float)
    found: list[tuple[str, float]] = []
    for state, seconds in spans:
        held[state] += seconds
        if found and found[-1][0] == state:
            found[-1] = state, found[-1][1] + held.pop(state)
        elif held[state] >= least_s:
            found.append((state, held.pop(state)))
    return found + list(held.items())


def encoded(events: Sequence[Event], tenth_s: float) -> list[str]:
    """By rank, spans as a state's first letter and tenths of a pixel: "f83w12b9". `tenth_s`: seconds of a tenth."""
    rows = []
    for found in segments(events).values():
        text, at_s, drawn = "", 0.0, 0
        spans = (("wait" if state == UNRECORDED else state, end_s - start_s) for start_s, end_s, state in found)
        for state, seconds in merged(spans, 10 * tenth_s):
            at_s += seconds
            tenths = round(at_s / tenth_s) - drawn
            drawn += tenths
            text += f"{state[0]}{tenths}" if tenths else ""
        rows.append(text)
    return rows


_model, _lengths = cache(Model.find), cache(named_lengths)


def cell(name: str, ranks: int, samples: int) -> dict:
    """FSDP2's fastest setting that fits, and ours: what the command prints of them, and their timelines."""
    lengths, kind = _lengths(name, 10_000), find_device(GPU)
    job = make_job(_model(MODEL), kind, usual_links(kind, ranks))
    how = {"token_cap": max(4096, *lengths), "memory_gb": kind.memory_gb, "timeline_of": samples, "split": True}
    rows = rank_settings(lengths, [samples], job=job, **how)
    printed = {each[2]: each for each in cells(rows)}
    theirs = next(row for row in rows if row.outcome.schedule != "odc" and row.fits)
    shown = [theirs, *(next(row for row in rows if row.name == way) for way in OURS)]
    longest_s = max(end_s - start_s for start_s, end_s in (window_s(row.outcome.events) for row in shown))
    ways = [
        {
            "name": row.name,
            "step": printed[row.name][3],
            "idle": printed[row.name][5],
            "ratio": f"{theirs.outcome.step_s / row.outcome.step_s:.2f}",
            "rows": encoded(row.outcome.events, longest_s / WIDTH / 10),
        }
        for row in shown
    ]
    return {"command": command(name, ranks, samples), "longest": f"{longest_s:.3g}", "ways": ways}


@cache
def data() -> dict[str, dict]:
    """All cells, by "lengths ranks samples"."""
    return {f"{name} {r} {samples}": cell(name, r, samples) for name in LENGTHS for r in RANKS for samples in SAMPLES}


def table() -> str:
    lines = [HEAD, "| --- |" + " --: |" * 2 + " --- |" + " --: |" * 6]
    for key, found in data().items():
        name, ranks, samples = key.split()
        numbers = " | ".join(f"{way['step']} | {way['idle']}" for way in found["ways"])
        theirs = found["ways"][0]["name"].removeprefix("FSDP2 ").removeprefix("+ ")
        lines.append(f"| {LENGTHS[name]} | {ranks} | {samples} | {theirs} | {numbers} |")
    return "\n".join(lines)


def write(app: Sphinx) -> None:
    known = {"lengths": LENGTHS, "ranks": RANKS, "samples": SAMPLES, "width": WIDTH, "cells": data()}
    path = Path(app.outdir, "_static", "lengths_data.js")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"window.LENGTHS = {json.dumps(known, separators=(',', ':'))};\n", encoding="utf-8")


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    if page == PAGE:
        folded = f"<details open>\n<summary>All {len(data())} choices as a table</summary>\n\n{table()}\n\n</details>\n"
        source[0] = source[0].replace(PLACE, f"{PLACE}\n{SCRIPTS}\n{folded}")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
