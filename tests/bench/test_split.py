"""The suite on splitting: a little of each part really runs, and the numbers of its rows are what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.harness import Measured, Work
from bench.provenance import RESULTS
from bench.suites import protocol_scale, split, split_cpu, split_memory, split_sleeping
from bench.suites.sleeping import Measured as Slept
from bench.variants import Ddp, Fsdp2, Fsdp2NoReshard, Odc, OdcSplit
from odc_triton.simulate.study import NAMED
from tests.bench.test_variants import CONFIG, cut_text
from tests.support.ranks import run

INTERVAL = {"ratio", "low", "high"}


def _in_a_rank(rank: int, world: int, function: Callable, args: tuple) -> object:
    return function(*args)


def quick_launch(function: Callable, *args: object, ranks: int) -> list:
    """`launch`, with ranks that begin in milliseconds."""
    return run(_in_a_rank, ranks, function, args)


@pytest.mark.slow
def test_a_little_of_each_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (protocol_scale, split_cpu, split_memory):
        monkeypatch.setattr(module, "launch", quick_launch)
    out = tmp_path / "split.json"
    assert split.main(["--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report) == {*split.PARTS, "about"}
    assert set(report["about"]) == set(split.PARTS)
    assert {"commit", "hardware", "versions", "took_s"} <= report["about"]["cpu"].keys()

    (slept,) = report["sleeping"]
    assert (slept["lengths"], slept["ranks"], slept["samples_per_rank"]) == ("longalign", 2, 1)
    # Sleeps are never too short, so this holds on any machine.
    assert 0 < slept["share_of_bound"] <= 1
    assert 0 <= slept["stall"] < 1
    assert slept["split_over_lb_mini"] == pytest.approx(slept["bound"] * slept["share_of_bound"])
    assert slept["split_over_barrier_global_packing"] > 0
    assert -1 < slept["simulation_off"] < 0

    (timed,) = report["cpu"]
    assert timed["samples_per_rank"] == 1
    for key in ("split_over_lb_mini", "over_fastest", "over_ddp"):
        assert 0 < timed[key]["low"] <= timed[key]["ratio"] <= timed[key]["high"]
    assert timed["over_fastest"].keys() > INTERVAL
    assert timed["over_fastest"]["ratio"] <= timed["over_ddp"]["ratio"]
    assert timed["bound"] > 1.05, "else nothing was split"
    assert timed["minibatches"] == 2
    assert timed["disturbed"].keys() == {"measured_anew", "left"}
    assert timed["loss_spread"] < 1e-5  # fp32 sums in another order

    (held,) = report["memory"]
    assert 1 <= held["room"]["ratio"] < 1.02  # a page of the heap's own, which is much for so small a room
    assert 0.3 < held["saved_by_autograd"]["ratio"] < 1
    assert held["over_the_cap"]["tokens"] == 2 * held["over_the_cap"]["token_cap"]
    assert held["over_the_cap"]["trains"]
    assert held["over_the_cap"]["loss"] == pytest.approx(math.log(97), abs=0.2)  # random tokens of 97

    (planned,) = report["planner"]
    assert 0 < planned["ms"] <= planned["most_ms"]


def test_parts_that_were_not_measured_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "split.json"
    out.write_text(json.dumps({"cpu": [1], "planner": [2], "about": {"cpu": 3}}))
    assert split.main(["--quick", "--only", "planner", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["cpu"] == [1]
    assert report["about"]["cpu"] == 3
    assert report["planner"][0]["ranks"] == 16


def test_a_quick_run_is_no_result() -> None:
    with pytest.raises(ValueError, match="a rehearsal measures nothing"):
        split.main(["--quick", "--only", "planner", "--out", str(RESULTS / "split.json")])


def test_the_default_takes_a_quarter_of_an_hour_at_most(tmp_path: Path) -> None:
    cells = split_sleeping.plan(split.RANKS, list(NAMED))
    assert 8 < split_sleeping.seconds_of(cells) / 60 < 14
    assert all(len(cell.minibatches) >= 3 for each in cells.values() for cell in each)
    works = [split_cpu.work_of(tmp_path, samples, count) for samples, count in split_cpu.MINIBATCHES.items()]
    assert 4 < sum(map(split_cpu.seconds_of, works)) / 60 < 14
    assert [len(work.minibatches) - split_cpu.WARM_UP >= least for work, least in zip(works, (60, 10, 10), strict=True)]
    # The longest of published lengths has the tokens that the module says.
    assert max(int(work.data().lengths.max()) for work in works) <= split_cpu.LONGEST
    assert max(int(work.data().lengths.max()) for work in works) > 0.8 * split_cpu.LONGEST


def test_a_row_of_sleeping_by_hand() -> None:
    cells = split_sleeping.plan([2], ["aime"], {1: 0.1}, minibatches=2)
    (cell,) = cells[2]

    def slept(way: object, seconds: float, simulated: float, stall: float = 0.0) -> Slept:
        return Slept(
            cell=cell,
            way=way,
            seconds=[seconds, seconds],
            simulated=[simulated, simulated],
            mean_work=[3.8, 3.8],
            largest_work=[4.0, 4.0],
            microbatches=[[1, 1]] * 2,
            stall=stall,
        )

    barrier, lb_mini, way = split_sleeping.WAYS
    (row,) = split_sleeping.rows_of([slept(barrier, 8, 7.9), slept(lb_mini, 6, 6.0), slept(way, 4, 3.9, 0.01)], 2)
    assert row["split_over_lb_mini"] == pytest.approx(1.5)
    assert row["split_over_barrier_global_packing"] == pytest.approx(2.0)
    assert row["bound"] == pytest.approx(6 / 3.8)
    assert row["share_of_bound"] == pytest.approx(0.95)
    assert row["stall"] == 0.01
    assert row["simulation_off"] == pytest.approx(-0.025), "the one that is farthest off"
    assert split_sleeping.cells_of(row)[3:] == ["1.50", "2.00", "1.58", "95.0%", "1.0%", "-2.5%"]


def test_a_row_of_cpu_by_hand(tmp_path: Path) -> None:
    work = Work(
        dataset=cut_text(tmp_path / "data.npz", (9, 9, 128, 64)),
        config=CONFIG,
        minibatches=[[0, 1], [2, 3]],
        token_cap=128,
    )
    cost = work.cost()
    even = (cost.sequence(128) + cost.sequence(64)) / 2
    assert split_cpu.bound(work) == pytest.approx(cost.sequence(128) / even)
    pace = {OdcSplit: 2.0, Odc: 3.0, Fsdp2: 5.0, Fsdp2NoReshard: 2.5, Ddp: 2.8}
    results = [
        Measured(
            name=kind.name,
            balance=kind.balance,
            seconds=[100.0, seconds],
            losses=[2.0, 1.0],
            waited_s=[[50.0, 0.0], [0.0, 0.5 if kind is Odc else 0.0]],
            repeats=[0, 1],
        )
        for kind, seconds in pace.items()
    ]
    row = split_cpu.row_of(work, 1, results)
    assert row["split_over_lb_mini"]["ratio"] == pytest.approx(1.5)
    assert row["over_ddp"]["ratio"] == pytest.approx(1.4)
    assert (row["over_fastest"]["ratio"], row["over_fastest"]["name"]) == (1.25, Fsdp2NoReshard.name)
    assert row["minibatches"] == 1
    assert row["disturbed"] == {"measured_anew": 1, "left": 1}
    assert len(split_cpu.cells_of(row)) == len(split_cpu.COLUMNS)


def test_saved_bytes_count_each_storage_once_and_none_that_is_shared() -> None:
    maps = "7f00-7f10 rw-s 00000000 00:01 5 /memfd:odc-heap (deleted)\n7f20-7f30 rw-p 00000000 00:00 0\n"
    assert split_memory.shared_ranges(maps) == [range(0x7F00, 0x7F10)]
    x = torch.randn(8, 4, requires_grad=True)
    saved = split_memory.SavedBytes()
    with saved:
        y = x.exp()  # saves its result
        (y * y.view(4, 8).view(8, 4)).sum()  # saves both factors, one storage
    assert list(saved.storages.values()) == [8 * 4 * 4]
