"""bench.suites.links: its tables, which GPUs it takes, and real runs of two processes over the CPU's heap."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import place  # isort: skip

from bench.provenance import read_lines
from bench.suites.links import LINES, Layer, by_kernels, measure_place, peers_of, wrong_results
from bench.suites.links_places import ON_CPU, places_of
from bench.suites.links_report import text_of
from odc_triton.comm.memory import ApartHeap
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.snapshots import topology

SMALL = Layer(own_bytes=16 * 48 * 2, world=2, columns=48, tokens=16)
CALLED = ["peer copies", "gloo all_gather", "gloo reduce_scatter", "scatter"]


def test_one_pair_of_each_kind_then_all_then_the_rest() -> None:
    mesh = places_of(topology("a100-nvlink-mesh"), every_pair=True)
    assert [len(each.names) for each in mesh] == [2, 4, 2, 2, 2, 2, 2]
    assert mesh[:2] == places_of(topology("a100-nvlink-mesh"), every_pair=False)
    assert [each.kind for each in mesh[:3]] == ["NV4 nvlink-4x25", "all at once", "NV4 nvlink-4x25"]
    assert mesh[0].gb_s == pytest.approx(100.0, rel=0.1)
    assert mesh[1].gb_s == pytest.approx(300.0, rel=0.1)  # to three peers
    assert all(each.refused is None for each in mesh)
    assert all(each.refused for each in places_of(topology("pcie-only"), every_pair=True))
    (masked,) = places_of(topology("a100-nvlink-mesh", 3, 1), every_pair=True)  # CUDA_VISIBLE_DEVICES=3,1
    assert masked.names == ("GPU1", "GPU3")
    assert masked.devices == (1, 0)


def _measure(rank: int, world: int, token: str, lines: Path, fault: str) -> None:
    import bench.suites.links as links

    if fault == "wrong" and rank == 1:
        links._whole_weight = lambda layer, device: torch.zeros(layer.rows, layer.columns)
    if fault == "baseline":
        links.REDUCE_SCATTER = lambda *given, group: torch.ones(2) @ torch.ones(3)  # a RuntimeError
    if fault == "killed" and rank == 0:
        begun = links._us

        def killed(*given: Any) -> list[float]:
            if len(read_lines(lines)) == 2:
                os._exit(9)
            return begun(*given)

        links._us = killed
    measure_place(ON_CPU, [SMALL], token, lines)


def test_two_processes_and_a_baseline_that_fails(tmp_path: Path) -> None:
    ranks.run(_measure, 2, uuid.uuid4().hex, tmp_path / LINES, "baseline")
    lines = read_lines(tmp_path / LINES)
    assert [line["operator"] for line in lines] == CALLED
    assert [line["link_bytes"] for line in lines] == [1536, 1536, 3072, 3072]
    assert [len(line["us"]) for line in lines] == [4, 4, 0, 4]  # rounds of both
    assert all(line["size"] == 1536 and min(line["us"], default=1.0) > 0 for line in lines)
    assert "failed" in text_of(lines)


def test_a_wrong_result_is_an_error_and_a_killed_run_keeps_its_cells(tmp_path: Path) -> None:
    with ranks.start(_measure, 2, uuid.uuid4().hex, tmp_path / "wrong.jsonl", "wrong") as job:
        (outcome,) = job.wait_for([1])
    whole = torch.cat([SMALL.integers(16, 48, owner, torch.device("cpu")) for owner in range(2)])
    assert f"peer copies between process 0, process 1: {int((whole != 0).sum())} numbers are wrong" in outcome.error
    with ranks.start(_measure, 2, uuid.uuid4().hex, tmp_path / LINES, "killed") as job:
        job.wait_for([0])
    assert [line["operator"] for line in read_lines(tmp_path / LINES)] == CALLED[:2]
    assert "gloo all_gather" in text_of(read_lines(tmp_path / LINES))


def _by_kernels(rank: int, world: int, token: str) -> tuple[dict[str, list[int]], list[list[int]]]:
    heap = ApartHeap(rank=rank, world=2, size_bytes=SMALL.heap_bytes, locks=1, token=token, timeout_s=LONG_S)
    heap.shard(SMALL.weight, rank).copy_(SMALL.integers(SMALL.own_rows, SMALL.columns, rank, heap.device))
    dist.barrier()
    operators = by_kernels(SMALL, heap)
    wrong = {name: list(wrong_results(SMALL, heap, each, dist.barrier)) for name, each in operators.items()}
    dist.barrier()
    return wrong, [each.far for each in peers_of(SMALL, heap)]


@pytest.mark.skipif(not place.INTERPRETED, reason="two processes on the CPU's heap")
def test_kernels_in_the_interpreter() -> None:
    """What runs between two GPUs, between two processes here: every result is right, and the other's rows are far."""
    for rank, (wrong, far) in enumerate(ranks.run(_by_kernels, 2, uuid.uuid4().hex)):
        names = ["gather", "linear direct", "linear staged", "scatter", "wgrad", "wgrad in bulk", "both at once"]
        assert wrong == {name: [] for name in names}
        assert far == [[1 - rank]] * 2
