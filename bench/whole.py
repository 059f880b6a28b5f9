"""Full tensors of shards, also where ranks share a GPU. Shared with the tests."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor on its device, sharded or not; of a DTensor collective, over host memory.

    `full_tensor()` over gloo, which is all that ranks on one GPU have, ends the process if shards are on a GPU: gloo's
    coalesced all-gather takes the device's addresses for the host's (pytorch/pytorch#152645).
    """
    if not isinstance(value, DTensor):
        return value.detach().clone()
    mesh = value.device_mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    on_host = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    layout = {"shape": value.shape, "stride": value.stride(), "run_check": False}
    parts = DTensor.from_local(value.detach().to_local().cpu(), on_host, value.placements, **layout)
    return parts.full_tensor().to(value.device, copy=True)
