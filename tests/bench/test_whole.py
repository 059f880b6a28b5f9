"""Full tensors over host memory: `full_tensor()` over gloo ends a rank's process where shards are on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bench.provenance import ROOT
from bench.whole import whole
from tests.support import ranks
from tests.support.replicas import mesh_of
from tests.test_imports import imported

# Rows over ranks: uneven ones, fewer than ranks, none; a scalar, which replicas have.
VALUES = [torch.arange(21.0).view(7, 3), torch.arange(2), torch.zeros(0, 3), torch.tensor([True] * 5)]
MESHES = {(4,): [Shard(0)], (2, 2): [Replicate(), Shard(0)]}


def _whole(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    for shape, placements in MESHES.items():
        mesh = mesh_of(shape)
        found += [whole(distribute_tensor(value, mesh, placements)) for value in VALUES]
        found.append(whole(distribute_tensor(torch.tensor(3.0), mesh, [Replicate()] * len(shape))))
    found.append(whole(distribute_tensor(VALUES[0], mesh_of((2, 2))["shard"], [Shard(0)])))
    return found


def test_all_rows_in_order() -> None:
    want = [*VALUES, torch.tensor(3.0)] * len(MESHES) + VALUES[:1]
    for found in ranks.run(_whole, 4):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_a_copy() -> None:
    plain = torch.nn.Parameter(torch.zeros(2))
    got = whole(plain)
    got += 1
    assert not plain.any()
    assert not got.requires_grad


def test_nothing_else_gathers() -> None:
    """In bench, tests/gpu and the tests' support that these import; but norms: a scalar's all-reduce is staged."""
    todo = {*(ROOT / "tests/gpu").glob("*.py"), *(ROOT / "bench").rglob("*.py")} - {ROOT / "bench/whole.py"}
    seen: set[Path] = set()
    while todo:
        seen.add(path := todo.pop())
        names = imported(path.read_text(), "tests.gpu")
        files = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.support.")}
        todo |= {each for each in files if each.exists()} - seen
    calls = {path: re.findall(r".*full_(?:tensor|state_dict).*", path.read_text()) for path in seen}
    found = {path: [call for call in of if "clip_grad_norm_" not in call] for path, of in calls.items()}
    assert {str(path): of for path, of in found.items() if of} == {}
