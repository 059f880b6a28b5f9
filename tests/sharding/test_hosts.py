"""Ranks on several hosts, told apart by ODC_HOST: which of them may share memory is one rule."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc_triton import RanksDiffer, fully_shard, minibatch
from odc_triton.sharding.agree import default_mesh
from tests.support import ranks
from tests.support.deadlines import LONG_S


def _trained(rank: int, world: int, hosts: list[str]) -> tuple[list[list[int]], torch.Tensor, str]:
    os.environ["ODC_HOST"] = hosts[rank]
    torch.manual_seed(0)
    mesh = default_mesh(timedelta(seconds=LONG_S))
    model = fully_shard(nn.Linear(4, 6), mesh=mesh)
    with minibatch(model):
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
    gradient = model.weight.grad.full_tensor()
    with pytest.raises(RanksDiffer, match=r"must share memory but are on several hosts.*'a', 'a', 'b', 'b'"):
        fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (world,)))
    dist.barrier()
    return mesh.mesh.tolist(), gradient, str(mesh.mesh_dim_names)


def test_each_host_has_a_copy() -> None:
    for mesh, gradient, names in ranks.run(_trained, 4, ["a", "a", "b", "b"]):
        assert mesh == [[0, 1], [2, 3]]
        assert "replicate" in names
        assert torch.equal(gradient, torch.full((6, 4), 2.0 * (1 + 2 + 3 + 4) / 4)), "the mean over all ranks"


def _refused(rank: int, world: int, hosts: list[str]) -> str:
    os.environ["ODC_HOST"] = hosts[rank]
    with pytest.raises(RanksDiffer) as caught:
        default_mesh(timedelta(seconds=LONG_S))
    return str(caught.value)


def test_hosts_that_take_turns_are_refused() -> None:
    for said in ranks.run(_refused, 4, ["a", "b", "a", "b"]):
        assert "in order [1, 1, 1, 1]" in said
