"""A parameter in the shards of another model, a frozen base: this model reads it, and owns none of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ..comm.layout import ParameterSpec, shard_rows
from .protocol import Protocol
from .shard import HeapShard


class BorrowedShard(HeapShard):
    """`spec`: as in the base, whose compute shard is its master too. `wanted`: as this model would shard it."""

    def __init__(self, lender: HeapShard, base: Protocol, wanted: ParameterSpec) -> None:
        spec = replace(
            lender.spec, names=wanted.names, unit=wanted.unit, master_dtype=lender.spec.compute_dtype, reduce_dtype=None
        )
        super().__init__(spec=spec, number=-1, compute=lender.region, gradient=None, heap=lender.heap, grid=base.grid)
        self._wanted, self._lender, self._published = wanted, lender, base.publication.number

    @property
    def saved_dtype(self) -> str:
        return self._wanted.master_dtype

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
        key, sums = (self._published, name, part, parts), self._lender.sums
        if key not in sums:
            sums[key] = add_up()
        return sums[key]
