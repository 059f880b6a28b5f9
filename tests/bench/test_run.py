"""The kernels' benchmark: its registry, its shapes, its checks, its report. What it times needs a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from bench.kernels.operators import all_operators  # first: it decides where kernels run  # isort: skip

from bench.kernels.cells import Cell
from bench.kernels.problem import DEVICE, TINY, Operator, Problem
from bench.kernels.run import check, main

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
