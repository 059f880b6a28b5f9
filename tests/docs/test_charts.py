"""Charts of results: a dot is where its number is. test_figures.py has what is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import exp, log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CHARTS = ("gains", "ranks", "split_gain", "prefix_gain", "image_gain", "overlap_gain", "predicted")
A_PIXEL = 0.003  # in shares of a value: positions are written with two decimals


def figure(name: str) -> ModuleType:
    return import_module(f"docs.figures.{name}")


@cache
def data_of(name: str) -> Any:
    return figure(name).data()


def results(file: str) -> Any:
    return json.loads((DOCS.parent / "bench" / "results" / file).read_text())


def scale_of(svg: str) -> Callable[[str], float]:
    """From a position to a value, by what is written below the chart's ends."""
    written = re.findall(r'<text class="faint small" x="([\d.]+)" y="36" text-anchor="middle">([\d.]+)(%?)<', svg)
    points = [(float(x), float(text) / (100 if percent else 1)) for x, text, percent in written]
    (left, low), (right, high) = points[0], points[-1]
    even = abs((points[1][0] - left) / (right - left) - (points[1][1] - low) / (high - low)) < 1e-3
    if even:
        return lambda x: low + (high - low) * (float(x) - left) / (right - left)
    return lambda x: exp(log(low) + log(high / low) * (float(x) - left) / (right - left))


def drawn(svg: str) -> list[tuple[float, ...]]:
    """Of each row, from the top, what is drawn: its bound, then its dots, each after its interval."""
    value = scale_of(svg)
    found = re.findall(
        r'<rect class="step" x="([\d.]+)"|<polyline class="\w+ thick" points="([\d.]+),[\d.]+ ([\d.]+),'
        r'|<circle class="\w+" cx="([\d.]+)"',
        svg,
    )
    return [
        (value(float(bound) + 1.5),) if bound else (value(dot),) if dot else (value(low), value(high))
        for bound, low, high, dot in found
    ]


def meant(name: str) -> list[tuple[float, ...]]:
    """What the chart should show, from the files alone."""
    rows: list[tuple[float, ...]] = []
    if name == "gains":
        demo, cells = results("demo.json"), results("end_to_end.json")["cells"]
        groups = [
            [demo["speedup_split_vs_fsdp2"], demo["speedup_split_vs_fastest"]],
            [demo["speedup_vs_fsdp2"], demo["speedup_vs_fastest"]],
            *([it for way, it in cell["variants"].items() if way != "ODC + LB-Mini"] for cell in cells.values()),
        ]
        for group in groups:
            for it in sorted(group, key=lambda it: -it["ratio"]):
                rows += [(it["low"], it["high"]), (it["ratio"],)]
    elif name == "split_gain":
        for cell in results("split.json")["cpu"]:
            for it in (cell["over_fastest"], cell["over_ddp"]):
                rows += [(cell["bound"],), (it["low"], it["high"]), (it["ratio"],)]
        sleeping = results("split.json")["sleeping"]
        for cell in sorted(sleeping, key=lambda it: (it["samples_per_rank"], -it["split_over_lb_mini"])):
            rows += [(cell["bound"],), (cell["split_over_lb_mini"],)]
    elif name == "prefix_gain":
        keys = ("over_dense", "over_tree_per_rank", "over_repeated")
        for cell in results("prefixes.json")["cpu"]:
            for it, bound in ((cell[key], cell["bounds"][key]) for key in keys):
                rows += [(bound,), (it["low"], it["high"]), (it["ratio"],)]
        rows += [(cell[key],) for cell in results("prefixes.json")["sleeping"] for key in keys[1:]]
    elif name == "image_gain":
        for arm in results("images.json")["cpu"]["arms"]:
            if arm["name"] != arm["over"]:
                rows += [(arm["bound"],), (arm["low"], arm["high"]), (arm["ratio"],), (arm["even"],)]
        for of in results("images.json")["bounds"][1:]:
            rows += [(bound,) for name, bound in of.items() if name != "ranks" and bound > 1.01]
    elif name == "overlap_gain":
        found = results("overlap.json")
        cells = found["sleeping"]["cells"] + found["sleeping_longer"]["cells"]
        settings = [(found[key]["ratio"], found[key]["bound"]["ratio"]) for key in ("server", "ranks")]
        for it, bound in [*settings, *((cell, cell["bound"]) for cell in cells)]:
            rows += [(bound,), (it["low"], it["high"]), (it["ratio"],)]
    elif name == "ranks":
        cells: dict = {}
        for row in results("protocol_scale.json")["rows"]:
            cells.setdefault((row["samples_per_rank"], row["ranks"], row["lengths"]), {})[row["way"]] = row
        for cell in sorted(cells.items(), key=lambda it: (*it[0][:2], -it[1]["ODC + LB-Mini"]["speedup"])):
            ways = cell[1]
            rows += [(ways["layer barrier + LB-Micro"]["speedup_bound"],)]
            rows += [(ways[way]["speedup"],) for way in ("layer barrier + global packing", "ODC + LB-Mini")]
    else:
        cells = {
            (row["samples_per_gpu"], (row["gpus"], row["gpus_per_host"])): row
            for row in results("scaling.json")["rows"]
            if row["model"] == "7 B"
        }
        for samples in (1, 2, 4):
            for where in ((8, 8), (64, 8), (1024, 8), (1024, 4), (1024, 2)):
                rows += [(cells[samples, where][way],) for way in ("fsdp2", "odc", "split")]
    return rows


@pytest.mark.parametrize("name", CHARTS)
def test_dots_intervals_and_bounds_are_where_their_numbers_are(name):
    shown = drawn(figure(name).draw(data_of(name)))
    assert len(shown) >= 18
    for there, expected in zip(shown, meant(name), strict=True):
        assert there == pytest.approx(expected, rel=A_PIXEL)


def test_memorys_dots_are_where_the_tables_numbers_are():
    lines = (DOCS / "tables" / "memory_per_gpu.md").read_text().split("\n\n")[1].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    shown = [value for (value,) in drawn((DOCS / "figures" / "memory_per_gpu.svg").read_text())]
    assert shown == pytest.approx([float(row[i]) for row in cells for i in (9, 10, 6)], abs=0.05, rel=A_PIXEL)


def test_cells_of_tables_are_the_files():
    def lines(name: str) -> list[list[str]]:
        text = (DOCS / "tables" / f"{name}.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
        return [line.strip("| \n").split(" | ") for line in text.splitlines()[2:]]

    it = results("end_to_end.json")["cells"]["equal"]["variants"]["DDP no_sync + LB-Mini"]
    (line,) = (line for line in lines("gains") if line[:2] == ["equal", "DDP no_sync + LB-Mini"])
    assert line[3:5] == [f"{it['ratio']:.2f}", f"{it['low']:.2f} to {it['high']:.2f}"]
    for cell, line in zip(results("split.json")["sleeping"], lines("split_gain")[3:], strict=True):
        assert line[2::2][:2] == [f"{cell['split_over_lb_mini']:.2f}", f"{cell['bound']:.2f}"]
    for row, line in zip(results("scaling.json")["rows"], lines("predicted"), strict=True):
        for way, cell in zip(("fsdp2", "odc", "split"), line[4:7], strict=True):
            gb, share = row["gb"][way], f"{row[way]:.0%}"
            assert cell == (share if gb <= 80 else f"{share}, H200" if gb <= 141 else "does not fit")
    queue = {(line[0].lower(), *map(int, line[1:3])): line[8] for line in lines("ranks")}
    for row in results("protocol_scale.json")["rows"]:
        if row["way"] == "ODC + queue":
            both = f"{row['speedup']:.2f} / {row['speedup_simulated']:.2f}"
            assert queue[row["lengths"], row["ranks"], row["samples_per_rank"]] == both
