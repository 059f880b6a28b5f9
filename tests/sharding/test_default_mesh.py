"""The mesh of ranks that were given none."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc_triton import RanksDiffer, fully_shard, minibatch
from odc_triton.sharding.agree import default_mesh, even_hosts
from tests.support import ranks
from tests.support.deadlines import LONG_S

SOON = timedelta(seconds=LONG_S)


def test_hosts_are_counted() -> None:
    assert {hosts: even_hosts(list(hosts)) for hosts in ("a", "aabb", "abc")} == {"a": 1, "aabb": 2, "abc": 3}
    for hosts, counts in (("aab", "[2, 1]"), ("abab", "[1, 1, 1, 1]"), ("aba", "[1, 1, 1]")):
        with pytest.raises(RanksDiffer, match="equally many ranks on each host") as raised:
            even_hosts(list(hosts))
        assert counts in str(raised.value)


def _meshes(rank: int, world: int) -> dict:
    seen = {"alone": default_mesh(SOON, "cpu").ndim}
    mesh = default_mesh(SOON, "cpu", replicas=2)
    again = default_mesh(SOON, "cpu", replicas=2)
    seen["ranks"], seen["names"] = mesh.mesh.tolist(), mesh.mesh_dim_names
    seen["groups"] = [dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names]
    seen["same groups"] = [mesh.get_group(name) is again.get_group(name) for name in mesh.mesh_dim_names]
    summed = []
    for name in mesh.mesh_dim_names:
        value = torch.tensor(10**rank)
        dist.all_reduce(value, group=mesh.get_group(name))
        summed.append(value.item())
    seen["summed"] = summed
    for count in (3, 8, -1):
        with pytest.raises(
            ValueError, match=f"4 ranks can't be split into {count} equal replicas: give a divisor of 4"
        ):
            default_mesh(SOON, "cpu", replicas=count)
    return seen


def test_replicas_that_were_asked_for() -> None:
    for rank, seen in enumerate(ranks.run(_meshes, 4)):
        assert seen["alone"] == 1  # all on this host
        assert (seen["ranks"], seen["names"]) == ([[0, 1], [2, 3]], ("replicate", "shard"))
        twins, replica = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert seen["groups"] == [twins, replica]
        assert seen["same groups"] == [True, True]
        assert seen["summed"] == [sum(10**each for each in twins), sum(10**each for each in replica)]


def _trained(rank: int, world: int, hosts: list[str]) -> tuple[list[list[int]], torch.Tensor, str]:
    os.environ["ODC_HOST"] = hosts[rank]
    torch.manual_seed(0)
    with pytest.raises(RanksDiffer, match=r"ranks 0 to 3 must share memory.*'b', 'b'\]. Give more replicas"):
        default_mesh(SOON, replicas=1)
    mesh = default_mesh(SOON)
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
