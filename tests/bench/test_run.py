"""The kernels' benchmark: its registry, its shapes, its checks. What it times needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.kernels.operators import all_operators  # first: it decides where kernels run  # isort: skip

from bench.kernels.problem import TINY, Operator, Problem
from bench.kernels.run import check

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = all_operators()


def problem(operator: Operator, *, tokens: int = 5, world: int = 3, layer: int = 0) -> Problem:
    tokens = tokens if operator.has_tokens else 0
    return Problem(model=TINY, layer=operator.layers(TINY)[layer], tokens=tokens, world=world, dtype=torch.bfloat16)


def test_every_kernel_file_is_measured() -> None:
    """All but those of waits: how long one takes is the other rank's doing."""
    others = {"batch_copy", "device", "flags", "ops", "peers", "qkv_inputs", "streams", "tiles"}
    files = {path.stem for path in (ROOT / "kernels").glob("*.py")} - others
    assert {name for operator in OPERATORS.values() for name in operator.kernels} == files


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_right_and_its_baselines_run(name: str) -> None:
    torch.manual_seed(0)  # few random ids may all be this rank's own, which makes no link bytes
    given = problem(OPERATORS[name], world=4)
    prepared = OPERATORS[name].prepare(given)
    found = check(prepared)
    assert found["passed"], found["fault"]
    assert found["errors"]
    for baseline in prepared.baselines.values():
        baseline()
    assert prepared.work.hbm_bytes > 0
    assert (prepared.work.link_bytes > 0) == bool(OPERATORS[name].kernels)
