"""One parameter's memory: the copy to read, the master to step, the gradient to add to; and who owns which rows."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from odc_kernels.peers import PeerShards

from ..comm.grid import Grid
from ..comm.layout import EXACT, ParameterSpec, Region, shard_rows
from ..comm.memory.heap import SymmetricHeap
from .exact import ExactSum
from .gradients import Target


class Storage:
    """Tensors are named as in the glossary in parameter.py. `rows`: (first, end) of each owner's."""

    def __init__(
        self,
        *,
        spec: ParameterSpec,
        slot: int,
        compute: Region,
        gradient: Region | None,
        heap: SymmetricHeap,
        grid: Grid,
    ) -> None:
        self.spec, self._heap, self._grid = spec, heap, grid
        self._rank, self.world = heap.rank, heap.world
        self.compute_shards = [heap.shard(compute, owner) for owner in range(self.world)]
        self._compute_shard = self.compute_shards[self._rank]
        own = self.part_of(self._compute_shard)
        if spec.has_own_master:
            self.master = torch.empty(own.shape, dtype=getattr(torch, spec.master_dtype), device=heap.device)
        else:
            self.master = own
        self.gradient_shard: torch.Tensor | None = None
        if gradient is not None:
            shards = [heap.shard(gradient, owner) for owner in range(self.world)]
            self.gradient_shard = shards[self._rank]
            self.gradient_part = self.part_of(self.gradient_shard)
            self.exact = ExactSum(heap.device) if spec.reduce_dtype == EXACT else None
            self.target = Target(slot=slot, shards=shards, rank=self._rank, near=heap.near, exact=self.exact)
        self.rows = [shard_rows(spec.shape[0], self.world, owner) for owner in range(self.world)]
        start, stop = self.rows[self._rank]
        part, end = shard_rows(stop - start, grid.replicas, grid.replica)
        # First and one-past-last row of the whole tensor that this rank has a master of.
        self.master_rows = start + part, start + end

    @cached_property
    def landed_part(self) -> torch.Tensor:
        """This rank's part of the sum as the optimizer gets it: the gradient part, or of exact sums, fp32, the first
        half of its memory.
        """
        part = self.gradient_part
        return part if self.exact is None else part.view(-1).view(torch.float32)[: part.numel()].view(part.shape)

    def as_dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's part of a tensor [N, ...], as a DTensor split like `sharded`."""
        shape = torch.Size(self.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self._grid.mesh, self._grid.placements, run_check=False, shape=shape, stride=stride
        )

    def parts_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Splits a shard of this rank by replica, as `torch.chunk` does: each has the master of its part."""
        replicas = self._grid.replicas
        return [shard[slice(*shard_rows(len(shard), replicas, replica))] for replica in range(replicas)]

    def part_of(self, shard: torch.Tensor) -> torch.Tensor:
        """The rows that this rank has masters of. With one replica that is the whole shard."""
        if self._grid.replicas == 1:
            return shard
        return self.parts_of(shard)[self._grid.replica]

    def gradient_parts(self) -> list[torch.Tensor]:
        """This rank's gradient shard by replica, to sum over replicas."""
        return self.parts_of(self.gradient_shard)

    def compute_parts(self) -> list[torch.Tensor]:
        """This rank's compute shard by replica, each of which publishes its part."""
        return self.parts_of(self._compute_shard)

    @torch.no_grad()
    def fill(self, value: torch.Tensor) -> None:
        """Writes the whole tensor [N, ...] into all owners' compute shards; the masters `adopt` it."""
        value = value.reshape(self.spec.shape)
        for shard, (start, stop) in zip(self.compute_shards, self.rows, strict=True):
            shard.copy_(value[start:stop])

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """A copy of the whole tensor [N, ...] in the compute dtype, read from its owners as they are now."""
        whole = self.compute_shards[0].new_empty(self.spec.shape)
        for rows, shard in zip(whole.split([len(s) for s in self.compute_shards]), self.compute_shards, strict=True):
            rows.copy_(shard)  # torch.cat would obey autocast
        return whole.view(self.spec.whole_shape)

    @torch.no_grad()
    def adopt(self, first: int, values: torch.Tensor) -> None:
        """Copies what this rank owns of `values`, elements `first`, `first` + 1, … of the whole, into its master."""
        row = math.prod(self.spec.shape[1:])
        start, stop = (rows * row for rows in self.master_rows)
        low, high = max(first, start), min(first + len(values), stop)
        if low < high:
            self.master.view(-1)[low - start : high - start].copy_(values[low - first : high - first])

    def own_part(self, whole: torch.Tensor) -> DTensor:
        """The whole tensor [N, ...], of which every rank has a copy, as a DTensor split like `sharded`."""
        start, stop = self.master_rows
        return self.as_dtensor(whole.reshape(self.spec.shape)[start:stop])

    def to_publish(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[(own part to read, master)] if the first is a copy of the second, to be refreshed after each step.

        Empty if they are the same memory.
        """
        if not self.spec.has_own_master:
            return []
        return [(self.part_of(self._compute_shard), self.master)]

    @cached_property
    def compute_peers(self) -> PeerShards:
        """The shards to read, as kernels see them.

        Plain torch may read them even where kernels could not: shards side by side are only as aligned as their rows.
        """
        return PeerShards.of(
            self.compute_shards,
            shape=self.spec.shape,
            rank=self._rank,
            aligned=self._heap.apart,
            near=self._heap.near,
        )
