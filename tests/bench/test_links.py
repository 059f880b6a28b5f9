"""bench.suites.links: its tables, which pairs it takes, and a real run of two processes over the CPU's heap."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch

from bench.suites.links import ON_CPU, PairOfGpus, Shape, integers, main, measure_links, measure_pair, pairs_of
from bench.suites.links_report import COLUMNS, Call, Link, as_data, matrix_of, operators_of, rows_of, text_of
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.snapshots import topology

SMALL = Shape(rows=32, columns=48, tokens=16, seconds=0.1)


def _call(us: float, link_bytes: int = 10**6) -> Call:
    return Call(us={"p20": us - 1, "p50": us, "p80": us + 1}, link_bytes=link_bytes)


LINKS = [
    Link(worker="GPU0", owner="GPU1", kind="nvlink-4x25", nominal_gb_s=100.0, calls={"copy": _call(20.0)}),
    Link(
        worker="GPU1",
        owner="GPU0",
        kind="nvlink-4x25",
        nominal_gb_s=100.0,
        calls={"copy": _call(10.0), "x": _call(5.0)},
    ),
    Link(worker="GPU0", owner="GPU10", kind="pcie-gen4x16", failure="no native atomics"),
]


def test_tables() -> None:
    assert LINKS[0].calls["copy"].gb_s == pytest.approx(50.0)  # a megabyte in 20 us
    assert operators_of(LINKS) == ["copy", "x"]
    rows = rows_of(LINKS)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0] == ["GPU0", "GPU1", "nvlink-4x25", 100.0, "copy", 19.0, 20.0, 21.0, pytest.approx(50.0), "50%"]
    assert rows[3][:5] == ["GPU0", "GPU10", "pcie-gen4x16", None, "not measured: no native atomics"]
    lines = matrix_of(LINKS, "copy").splitlines()
    assert [word.strip() for word in lines[0].split("|")[1:-1]] == ["copy, GB/s", "GPU0", "GPU1", "GPU10"]
    cells = [[word.strip() for word in line.split("|")[1:-1]] for line in lines[2:]]
    assert [float(cells[0][2]), float(cells[1][1])] == [50.0, 100.0]
    assert {cells[0][1], cells[0][3], *cells[2][1:]} == {"–"}
    assert text_of(LINKS).count("GB/s") >= 3


def test_data() -> None:
    data = json.loads(json.dumps(as_data(LINKS, {"commit": "abc"})))
    assert data["commit"] == "abc"
    assert data["links"][0]["calls"]["copy"]["gb_s"] == pytest.approx(50.0)
    assert data["links"][2]["failure"] == "no native atomics"


def test_pairs_of_machines() -> None:
    mesh = pairs_of(topology("a100-nvlink-mesh"))
    assert len(mesh) == 6
    assert {pair.kind for pair in mesh} == {"nvlink-4x25"}
    assert all(pair.refused is None and pair.nominal_gb_s == pytest.approx(100.0, rel=0.1) for pair in mesh)
    assert {pair.devices for pair in mesh} == {(a, b) for a in range(4) for b in range(a + 1, 4)}
    assert all(pair.refused for pair in pairs_of(topology("pcie-only")))
    (masked,) = pairs_of(topology("a100-nvlink-mesh", 3, 1))  # CUDA_VISIBLE_DEVICES=3,1
    assert masked.names == ("GPU1", "GPU3")
    assert masked.devices == (1, 0)


def test_one_pair_hides_no_other() -> None:
    pairs = [
        PairOfGpus(names=("a", "b"), devices=(0, 1), kind="k", nominal_gb_s=1.0),
        PairOfGpus(names=("a", "c"), devices=(0, 2), kind="k", nominal_gb_s=1.0, refused="not reachable"),
        PairOfGpus(names=("b", "c"), devices=(1, 2), kind="k", nominal_gb_s=1.0),
    ]
    told, asked = [], []

    def measure(pair: PairOfGpus) -> list[dict[str, Call]]:
        asked.append(pair.names)
        if pair.names == ("a", "b"):
            raise RuntimeError("rank 1 failed\nfirst")
        return [{"copy": _call(10.0)}, {"copy": _call(20.0)}]

    links = measure_links(pairs, measure, lambda links: told.append(len(links)))
    assert asked == [("a", "b"), ("b", "c")]
    assert told == [2, 4, 6]
    assert [link.failure for link in links] == ["rank 1 failed first"] * 2 + ["not reachable"] * 2 + [None] * 2
    assert (links[5].worker, links[5].owner, links[5].calls["copy"].us["p50"]) == ("c", "b", 20.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 40}, "rows is 40"),
        ({"columns": 0}, "columns is 0"),
        ({"tokens": 8}, "tokens is 8"),
        ({"seconds": 0.0}, "seconds is 0"),
    ],
)
def test_wrong_shapes(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shape(**changes)


def test_wrong_words(capsys, tmp_path: Path) -> None:
    for words, said in ((["--rows", "40"], "rows is 40"), (["--backend", "rocm"], "invalid choice")):
        with pytest.raises(SystemExit):
            main([*words, "--out", str(tmp_path)])
        assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _measure(rank: int, world: int, token: str, spoilt: bool) -> dict[str, Call]:
    import bench.suites.links

    if spoilt and rank == 1:
        bench.suites.links._whole_weight = lambda shape, device: torch.zeros(shape.rows, shape.columns)
    return measure_pair(SMALL, ON_CPU.devices, token)


def test_two_processes() -> None:
    for found in ranks.run(_measure, 2, uuid.uuid4().hex, False):
        assert list(found) == ["copy", "scatter"]
        assert found["copy"].link_bytes == 16 * 48 * 2
        assert found["scatter"].link_bytes == 16 * 48 * 4
        assert all(0 < call.us["p20"] <= call.us["p50"] <= call.us["p80"] for call in found.values())


def test_a_wrong_result_is_an_error() -> None:
    with ranks.start(_measure, 2, uuid.uuid4().hex, True) as job:
        (outcome,) = job.wait_for([1])
    zeros = sum(int((integers(16, 48, owner, torch.device("cpu")) == 0).sum()) for owner in range(2))
    assert f"copy between two processes: {32 * 48 - zeros} numbers are wrong on rank 1" in outcome.error


def _by_kernels(rank: int, world: int, token: str) -> tuple[list[str], list[tuple[str, int]]]:
    import torch.distributed as dist

    from bench.suites.links import _wrong_results, on_gpu, peers_of
    from odc_triton.comm.memory import ApartHeap

    heap = ApartHeap(rank=rank, world=2, size_bytes=SMALL.part_bytes, slots=1, token=token, timeout_s=LONG_S)
    heap.shard(SMALL.weight, rank).copy_(integers(SMALL.rows // 2, SMALL.columns, rank, heap.device))
    dist.barrier()
    assert [each.far for each in peers_of(SMALL, heap)] == [[1 - rank]] * 2
    operators = on_gpu(SMALL, heap)
    wrong = list(_wrong_results(SMALL, heap, operators, dist.barrier))
    dist.barrier()
    return list(operators), wrong


def test_kernels_in_the_interpreter() -> None:
    """What runs between two GPUs, between two processes here: every result is right."""
    for names, wrong in ranks.run(_by_kernels, 2, uuid.uuid4().hex):
        assert names == [
            *("copy", "gather", "linear direct", "linear staged", "scatter"),
            *("wgrad", "wgrad in bulk", "both at once"),
        ]
        assert wrong == []


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys) -> None:
    words = [
        "--backend",
        "cpu-apart",
        "--rows",
        "32",
        "--columns",
        "48",
        "--tokens",
        "16",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "its figures say nothing of links" in said
    data = json.loads((tmp_path / "out" / "links.json").read_text())
    assert [list(link["calls"]) for link in data["links"]] == [["copy", "scatter"]] * 2
    assert {"commit", "hardware", "versions", "shape"} <= data.keys()
    assert "scatter, GB/s" in (tmp_path / "out" / "links.md").read_text()
