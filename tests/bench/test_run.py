"""The kernels' benchmark: its registry, its shapes, its checks, its report. What it times needs a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench.kernels.operators import all_operators  # first: it decides where kernels run  # isort: skip

from bench.kernels.cells import Cell, Report
from bench.kernels.problem import DEVICE, TINY, Operator, Prepared, Problem, Results, Work
from bench.kernels.run import check, main, run_cells
from bench.provenance import append_line

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = all_operators()


def problem(operator: Operator, *, tokens: int = 5, world: int = 3, layer: int = 0) -> Problem:
    tokens = tokens if operator.has_tokens else 0
    return Problem(model=TINY, layer=operator.layers(TINY)[layer], tokens=tokens, world=world, dtype=torch.bfloat16)


def test_every_kernel_file_is_measured() -> None:
    """All but those of premises.py: how long a wait takes is the other rank's doing."""
    others = {"batch_copy", "device", "flags", "ops", "peers", "qkv_inputs", "streams", "tiles"}
    files = {path.stem for path in (ROOT / "kernels").glob("*.py")} - others
    assert {name for operator in OPERATORS.values() for name in operator.kernels} == files


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("world", [1, 4])
def test_every_operator_is_right_and_its_baselines_run(name: str, world: int) -> None:
    torch.manual_seed(0)  # few random ids may all be this rank's own, which makes no link bytes
    given = problem(OPERATORS[name], world=world)
    cell, prepared = Cell.of(OPERATORS[name], given), OPERATORS[name].prepare(given)
    check(cell, prepared)
    assert cell.passed, cell.fault
    assert cell.errors
    for baseline in prepared.baselines.values():
        baseline()
    assert prepared.work.hbm_bytes > 0
    assert (prepared.work.link_bytes > 0) == (world > 1 and bool(OPERATORS[name].kernels))


def test_work_by_hand() -> None:
    # "gate, up" of the tiny model: 75 rows of 48, of which rank 0 of 3 owns 25.
    direct, reading, adding = (
        OPERATORS[name].prepare(problem(OPERATORS[name], layer=2)).work for name in ("linear direct", "gather", "wgrad")
    )
    assert direct == Work(
        flops=2 * 5 * 75 * 48,
        hbm_bytes=2 * (5 * 48 + 25 * 48 + 5 * 75),
        link_bytes=2 * 50 * 48,
        peer_bytes=2 * 50 * 48,
    )
    assert reading == Work(hbm_bytes=2 * (25 + 75) * 48, link_bytes=2 * 50 * 48, peer_bytes=2 * 50 * 48)
    assert adding == Work(
        flops=2 * 5 * 75 * 48,
        hbm_bytes=2 * 5 * (75 + 48) + 8 * 25 * 48,
        link_bytes=4 * 50 * 48,
        peer_bytes=8 * 50 * 48,
    )


def broken(operator: Operator, change: Callable[[Results], Results]) -> Operator:
    """The operator, checked against something else."""

    def prepare(given: Problem) -> Prepared:
        prepared = operator.prepare(given)
        return replace(prepared, check=lambda: change(prepared.check()))

    return replace(operator, prepare=prepare)


def larger(results: Results) -> Results:
    for name, got, want in results:
        yield name, got, want * 1.05


def unwritten(results: Results) -> Results:
    for name, got, want in results:
        got = got.clone()
        got[-1, -1] = torch.nan
        yield name, got, want
        yield name, torch.zeros_like(got), torch.zeros_like(want)


def narrower(results: Results) -> Results:
    for name, got, want in results:
        yield name, got, want[:, 1:]


def raising(results: Results) -> Results:
    raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (larger, r"y is off by [45]\..*allowed 1.6e-02"),
        (unwritten, "y is off by inf"),
        (narrower, "its reference"),
        (raising, "RuntimeError: no such instruction$"),
    ],
)
def test_a_wrong_result_fails_its_cell_and_no_other(change: Callable, words: str, tmp_path: Path) -> None:
    linear = OPERATORS["linear direct"]
    todo = [(broken(linear, change), problem(linear)), (linear, problem(linear))]
    report = Report()
    run_cells(todo, report, machine=None, seed=1, folder=tmp_path)
    wrong, right = report.cells
    assert not wrong.passed
    assert re.search(words, wrong.fault), wrong.fault
    assert right.passed
    assert not report.passed
    assert "FAILED" in report.text()
    assert json.loads((tmp_path / "kernels.json").read_text())["passed"] is False


ABOUT = {"gpu": {"name": "one"}, "source": "1", "timed": False, "dtype": "bfloat16", "versions": {}}


def names_in(folder: Path, about: dict | None = ABOUT) -> list[str]:
    return [cell.name for cell in Report.load(folder, about).cells]


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    gather = OPERATORS["gather"]
    todo = [(gather, problem(gather, world=world)) for world in (1, 2, 3)]
    lines = tmp_path / "kernels.jsonl"
    append_line(lines, {"about": ABOUT | {"seed": 5}})
    run_cells(todo[:1], Report(), machine=None, seed=1, folder=tmp_path)
    append_line(lines, {"begin": Cell.of(*todo[1]).name})  # and then it was killed
    append_line(lines, {"about": ABOUT | {"seed": 6}})
    report = Report.load(tmp_path, ABOUT)
    assert report.about["seed"] == 5
    assert report.begun == [Cell.of(*todo[1]).name]
    assert "cut short by a kill" in report.text()
    ran: list[int] = []

    def noted(operator: Operator, given: Problem) -> tuple[Operator, Problem]:
        def prepare(of: Problem) -> Prepared:
            ran.append(of.world)
            return operator.prepare(of)

        return replace(operator, prepare=prepare), given

    assert run_cells([noted(*pair) for pair in todo], report, machine=None, seed=1, folder=tmp_path)
    assert ran == [3, 2], "what was measured is kept, what did not end comes last"
    assert report.begun == []
    assert sorted(names_in(tmp_path)) == sorted(Cell.of(*pair).name for pair in todo)
    assert names_in(tmp_path, None) == names_in(tmp_path)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="has a GPU")
def test_without_a_gpu_it_checks_and_says_that_it_timed_nothing(tmp_path: Path, capfd) -> None:
    words = ["--operator", "gather", "--world", "3", "--dtype", "float16"]
    assert main([*words, "--seed", "7", "--out", str(tmp_path / "new")]) == 0
    said = capfd.readouterr().out
    assert said.startswith("No GPU: ")
    assert "5 of 5 cells passed their check, nothing was timed; 0 left out; 0 kept from before; seed 7" in said
    data = json.loads((tmp_path / "new" / "kernels.json").read_text())
    assert set(data) == {
        *("rehearsal", "hardware", "gpu", "reached", "timed", "peers", "dtype", "seed", "versions", "commit", "source"),
        *("passed", "cells", "left_out", "not_ended"),
    }
    assert (data["timed"], data["gpu"], data["peers"]) == (False, None, "loopback: no link in these figures")
    assert len(data["cells"]) == 5
    assert set(data["cells"][0]) == set(asdict(Cell.of(OPERATORS["gather"], problem(OPERATORS["gather"]))))
    assert {cell["dtype"] for cell in data["cells"]} == {"float16"}
