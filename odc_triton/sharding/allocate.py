"""Parameters over the shards that they were given: where whole tensors are, and what kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from odc_kernels.staged import Staging

from ..comm.grid import Grid
from ..comm.layout import MemoryLayout
from ..comm.memory.heap import SharedMemoryHeap, SymmetricHeap
from ..engine.exact import ExactTarget
from ..engine.gathered import GatheredParameters
from ..engine.parameter import ShardedParameter
from ..engine.shard import HeapShard
from ..engine.transport import Streams, Target, Transport
from .backend import Backend
from .collect import Description, FoundParameter

if TYPE_CHECKING:
    from ..nn.tuned import Tuned


def shards_of(plan: MemoryLayout, heap: SymmetricHeap, grid: Grid, *, exact: bool) -> list[HeapShard]:
    """The memory of the plan's parameters, not filled yet."""
    target = ExactTarget if exact else Target
    regions = zip(plan.parameters, plan.compute, plan.gradient, strict=True)
    return [
        HeapShard(spec=spec, number=number, compute=compute, gradient=gradient, heap=heap, grid=grid, target=target)
        for number, (spec, compute, gradient) in enumerate(regions)
    ]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What all parameters of a model have in common. `tuned`: how operators run, None if no layer asks."""

    described: Description
    device: Backend
    tuned: Tuned | None
    staging: Staging
    expert_cache_bytes: int

    def parameters(
        self, found: Sequence[FoundParameter], shards: Sequence[HeapShard], transport: Transport
    ) -> list[ShardedParameter]:
        """Over `shards` of one heap, `transport`'s, in the places where they were `found`."""
        heap, kind = transport.heap, self.device.mesh_device
        tables = [self.tuned.table(shard.spec.compute_dtype) if self.tuned else () for shard in shards]
        self.described.refuse_whole_ties(kind)
        readers = enumerate(zip(found, tables, strict=True))
        on_demand = {number for number, (entry, table) in readers if entry.is_read_on_demand(kind, table)}
        wholes = self._whole_tensors(shards, heap, transport.streams, on_demand)
        rows: dict[HeapShard, Any] = {}
        if heap.apart and (on_demand or self.expert_cache_bytes):
            from ..engine.kept import rows_of_owners

            reading = [(shards[number], found[number], tables[number]) for number in sorted(on_demand)]
            keeping = [shard for shard, entry, table in reading if entry.keeps_rows(kind, table)]
            if self.expert_cache_bytes and not keeping:
                self.described.refuse_useless_cache()
            rows = rows_of_owners([shard for shard, *_ in reading], keeping, transport.streams, self.expert_cache_bytes)
        return [
            ShardedParameter(
                shard=shard,
                number=number,
                like=found[number].parameter,
                whole=whole,
                gathered=gathered,
                transport=transport,
                staging=self.staging,
                table=table,
                rows=rows.get(shard),
            )
            for number, (shard, (whole, gathered), table) in enumerate(zip(shards, wholes, tables, strict=True))
        ]

    def _whole_tensors(
        self, shards: Sequence[HeapShard], heap: SymmetricHeap, streams: Streams, on_demand: set[int]
    ) -> list[tuple[torch.Tensor, GatheredParameters | None]]:
        """Every parameter's whole tensor: a view of the heap, or one that is gathered together with its unit's others.

        `on_demand`: numbers of those that are never gathered; their tensors have no memory.
        """
        if isinstance(heap, SharedMemoryHeap) and not heap.apart:
            return [(heap.whole(shard.region), None) for shard in shards]
        found: dict[int, tuple[torch.Tensor, GatheredParameters | None]] = {}
        for number in on_demand:
            region = shards[number].region
            empty = torch.empty(region.shape, dtype=getattr(torch, region.dtype), device=heap.device)
            empty.untyped_storage().resize_(0)
            found[number] = empty, None
        for unit in dict.fromkeys(shard.spec.unit for shard in shards):
            numbers = [
                number for number, shard in enumerate(shards) if shard.spec.unit == unit and number not in on_demand
            ]
            if not numbers:
                continue
            gathered = GatheredParameters(
                [shards[number].spec for number in numbers],
                [shards[number].compute_shards for number in numbers],
                rank=heap.rank,
                streams=streams,
                near=heap.near or frozenset(),
                by_kernel=self.device.gathers_by_kernel,
                batch_copy=self.device.batch_copy(),
            )
            found |= {number: (whole, gathered) for number, whole in zip(numbers, gathered.whole, strict=True)}
        return [found[number] for number in range(len(shards))]
