"""The CPU's heap laid out as a GPU's: every rank's shards in a part of their own."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import Region, aligned
from .shm import SharedMemoryHeap


class ApartHeap(SharedMemoryHeap):
    """For tests, and to look for a fault without a GPU: whole tensors are gathered and freed as they are on CUDA.

    `size_bytes`: of one rank's part. Locks, words and errors as in `SharedMemoryHeap`.
    """

    apart = True

    def __init__(self, *, world: int, size_bytes: int, **options: Any) -> None:
        self._part_bytes = aligned(size_bytes)
        super().__init__(world=world, size_bytes=world * self._part_bytes, **options)

    def whole(self, region: Region) -> torch.Tensor:
        raise NotImplementedError("the shards lie apart: gather them")

    def shard(self, region: Region, owner: int) -> torch.Tensor:
        own = region.own_shard(self.world, owner)
        return self._tensor(own, part=owner * self._part_bytes)
