"""A parameter in the shards of another model, a frozen base: this model reads it, and owns none of its memory.

Where whole tensors are views of one memory, what is read is cut for this model's ranks, as if these owned it: what goes
by owners, such as a fused head's sums, is then computed as without a base, to the same bits. `sharded` is always split
as the base is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ..comm.grid import Grid
from ..comm.layout import ParameterSpec, shard_rows
from ..comm.memory.heap import SharedMemoryHeap
from .protocol import Protocol
from .shard import HeapShard, versions_of


class BorrowedShard(HeapShard):
    """`spec`: as in the base, whose compute shard is its master too. `wanted`: as this model would shard it."""

    def __init__(self, lender: HeapShard, base: Protocol, wanted: ParameterSpec, grid: Grid) -> None:
        spec = replace(
            lender.spec, names=wanted.names, unit=wanted.unit, master_dtype=lender.spec.compute_dtype, reduce_dtype=None
        )
        heap = lender.heap
        super().__init__(spec=spec, number=-1, compute=lender.region, gradient=None, heap=heap, grid=base.grid)
        if isinstance(heap, SharedMemoryHeap) and not heap.apart:
            whole, self._rank, self.world = heap.whole(lender.region), grid.shard, grid.shards
            self.rows = [shard_rows(len(whole), self.world, owner) for owner in range(self.world)]
            self.compute_shards = [whole[slice(*rows)] for rows in self.rows]
            self._near = frozenset(range(self.world))
        self._wanted, self._lender, self._published = wanted, lender, base.publication.number

    @property
    def saved_dtype(self) -> str:
        return self._wanted.master_dtype

    def to_publish(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.versions not in (None, versions_of(self.sharded)):
            raise RuntimeError(
                f"{self.name} was edited, and is in a base that other runs read: edit no borrowed parameter"
            )
        return super().to_publish()

    def values_of(self, part: int, parts: int) -> tuple[int, torch.Tensor]:
        first, end = shard_rows(self.spec.shape[0], parts, part)
        found = [
            rows[max(first - at, 0) : max(end - at, 0)]
            for (at, _), rows in zip(self.rows, self.compute_shards, strict=True)
        ]
        values = torch.cat([each.reshape(-1) for each in found]).to(getattr(torch, self.saved_dtype))
        return first * math.prod(self.spec.shape[1:]), values

    def kept_sum(self, name: str, part: int, parts: int, add_up: Callable[[], int]) -> int:
        """`add_up()`, which is of these values: kept for the next model that borrows them under the same name."""
        key, sums = (self._published, name, self.saved_dtype, part, parts), self._lender.sums
        if key not in sums:
            sums[key] = add_up()
        return sums[key]
