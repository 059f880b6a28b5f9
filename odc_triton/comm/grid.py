"""The ranks of a model: which of them share memory, and which are replicas of each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

_FOREIGN = ("tp", "cp", "pp", "ep", "sp")
_REPLICATE = ("replicate", "dp_replicate")
_SHARD = ("shard", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`replicas` groups of ranks, each of which shares memory and holds all compute shards: a node each, or one.

    Ranks are numbered consecutively, replica by replica. Gradients are added within the replica, and once per minibatch
    over the replicas; masters are split over all ranks: rank (replica r, shard s) owns chunk r of chunk s.
    """

    mesh: DeviceMesh
    """The mesh of the parameters as DTensors; with two dimensions (shard, replicate): the user's mesh, transposed."""
    shard_mesh: DeviceMesh
    """The ranks of this replica, which read each other's shards."""
    ranks: tuple[int, ...]
    """All ranks, by their numbers in the job."""
    rank: int
    world: int
    replica: int
    replicas: int
    replica_group: ProcessGroup | None
    """The ranks with this one's compute shard, by replica; None if there is only one dimension."""

    @property
    def shards(self) -> int:
        """Ranks per replica."""
        return self.world // self.replicas

    @property
    def shard(self) -> int:
        return self.rank % self.shards

    @property
    def first(self) -> int:
        """This replica's first rank; the others follow it."""
        return self.replica * self.shards

    @property
    def twins(self) -> list[int]:
        """The ranks with this one's compute shard, by replica, including itself."""
        return list(range(self.shard, self.world, self.shards))

    @property
    def placements(self) -> list[Placement]:
        return [Shard(0)] * self.mesh.ndim

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks. Raises NotImplementedError for two dimensions over only part of the job."""
        if self.mesh.ndim == 1:
            return self.mesh.get_group()
        if self.world != dist.get_world_size():
            raise NotImplementedError(
                f"the mesh has {self.world} of {dist.get_world_size()} ranks in two dimensions, which have no common "
                f"process group: give a mesh of all ranks, or of one dimension"
            )
        return dist.distributed_c10d._get_default_group()


def refuse_mesh(mesh: DeviceMesh) -> None:
    """Raises for a mesh that parameters can't be sharded over: NotImplementedError, or ValueError outside its ranks."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2:
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: give its data-parallel dimension")
    if mesh.ndim == 2 and not (names and names[0] in _REPLICATE and names[1] in _SHARD):
        turned = bool(names) and names[0] in _SHARD and names[1] in _REPLICATE
        raise NotImplementedError(
            f"mesh has {mesh.ndim} dimensions {names or 'without names'}: parameters are sharded over one dimension, "
            + (
                "or replicated over the first and sharded over the second: swap the dimensions of the mesh"
                if turned
                else "give its data-parallel dimension, mesh['dp']; or over two of the names ('replicate', 'shard')"
            )
        )
    foreign = [name for name in names if name in _FOREIGN]
    if foreign:
        raise NotImplementedError(
            f"mesh dimension {foreign[0]!r}: tensor, context and pipeline parallelism can't be combined with this"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {mesh}: call fully_shard on the mesh's ranks only")


def grid_of(mesh: DeviceMesh) -> Grid:
    """The grid of a mesh that `refuse_mesh` accepts. No communication."""
    shard, turned, replica, replicas, group = mesh, mesh, 0, 1, None
    if mesh.ndim == 2:
        names = mesh.mesh_dim_names or ()
        replicate, shard = (mesh[name] for name in names)
        replica, replicas, group = replicate.get_local_rank(), replicate.size(), replicate.get_group()
        # New: with one rank in a dimension `T.contiguous()` keeps strides, by which torch 2.11 orders dimensions.
        ranks, groups = torch.tensor(mesh.mesh.T.tolist(), dtype=mesh.mesh.dtype), [shard.get_group(), group]
        turned = DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names[::-1])
    return Grid(
        mesh=turned,
        shard_mesh=shard,
        ranks=tuple(mesh.mesh.flatten().tolist()),
        rank=replica * shard.size() + shard.get_local_rank(),
        world=mesh.size(),
        replica=replica,
        replicas=replicas,
        replica_group=group,
    )
