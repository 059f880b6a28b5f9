"""Stands for `torch.distributed._symmetric_memory`, which has no CPU backend: on the memory that processes share.

The tensors of all ranks are real and shared. Only `barrier` differs: the host waits, and not a stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from odc_triton.comm.layout import Region, aligned
from odc_triton.comm.memory.heap import ApartHeap
from tests.support.deadlines import LONG_S


class Handle:
    def __init__(self, heap: ApartHeap, region: Region) -> None:
        self._heap, self._region = heap, region

    def get_remote_tensor(self, peer: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self._heap.shard(self._region, peer).view(dtype).view(sizes)

    def barrier(self) -> None:
        dist.barrier()


def install(rank: int, world: int, token: str) -> None:
    """Puts `empty` and `rendezvous` in the place of torch's, in this process."""
    import torch.distributed._symmetric_memory as symmetric_memory

    heap = ApartHeap(rank=rank, world=world, size_bytes=1 << 18, locks=1, token=token, timeout_s=LONG_S)
    regions: dict[int, Region] = {}
    used_bytes = 0

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal used_bytes
        name, shape = str(dtype).removeprefix("torch."), (size[0] * world, *size[1:])
        region = Region(shape=shape, dtype=name, itemsize=dtype.itemsize, offset_bytes=used_bytes)
        tensor = heap.shard(region, rank)
        used_bytes = aligned(used_bytes + tensor.nbytes)
        regions[tensor.data_ptr()] = region
        return tensor

    def rendezvous(tensor: torch.Tensor, group: Any) -> Handle | None:
        dist.barrier(group)
        region = regions.get(tensor.data_ptr())
        return None if region is None else Handle(heap, region)

    symmetric_memory.empty, symmetric_memory.rendezvous = empty, rendezvous
