"""bench.suites.links: a real run of two processes over the CPU's heap."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch

from bench.provenance import read_lines
from bench.suites.links import LINES, Layer, measure_place
from bench.suites.links_places import ON_CPU
from bench.suites.links_report import text_of
from tests.support import ranks

SMALL = Layer(own_bytes=16 * 48 * 2, world=2, columns=48, tokens=16)
CALLED = ["peer copies", "gloo all_gather", "gloo reduce_scatter", "scatter"]


def _measure(rank: int, world: int, token: str, lines: Path) -> None:
    import bench.suites.links as links

    links.REDUCE_SCATTER = lambda *given, group: torch.ones(2) @ torch.ones(3)  # a RuntimeError
    measure_place(ON_CPU, [SMALL], token, lines)


def test_two_processes_and_a_baseline_that_fails(tmp_path: Path) -> None:
    ranks.run(_measure, 2, uuid.uuid4().hex, tmp_path / LINES)
    lines = read_lines(tmp_path / LINES)
    assert [line["operator"] for line in lines] == CALLED
    assert [line["link_bytes"] for line in lines] == [1536, 1536, 3072, 3072]
    assert [len(line["us"]) for line in lines] == [4, 4, 0, 4]  # rounds of both
    assert all(line["size"] == 1536 and min(line["us"], default=1.0) > 0 for line in lines)
    assert "failed" in text_of(lines)
