"""The collectives of replicas: the sum of gradient shards, and the exchange of the parts of compute shards.

Both use bounded buffers and the process group of the ranks with the same shard index (gloo or NCCL), and start only
when all of these are known to have arrived. A rank that waits for a collective also checks which ranks are alive, so
none hangs. Shards use `all_to_all_single` and `all_gather` over parts padded to one size: gloo's reduce-scatter is an
all-reduce, of twice the bytes, and can't be waited for without blocking.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import OdcError
from .barrier import Barrier
from .grid import Grid

_BUFFER_BYTES = 64 * 2**20  # what a rank sends in one exchange

Parts = Sequence[torch.Tensor]  # of one shard, by replica: consecutive rows, the first the largest, the last maybe none
_Chunk = tuple[int, list[torch.Tensor]]  # where in the buffer, and what of each replica's part, flattened


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second of each pair into the first, all at once: chunks are many and small."""
    pairs = [(into, value) for into, value in pairs if len(value)]
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [value for _, value in pairs])


class Replicas:
    """The ranks with this one's compute shard. A single replica has only `count`."""

    def __init__(self, grid: Grid, barrier: Barrier, device: torch.device) -> None:
        self.count, self.index = grid.replicas, grid.replica
        self._grid, self._barrier = grid, barrier
        self._gathers = 0
        if self.count > 1:
            self._reached = barrier.status()  # how many exchanges
        self._group = grid.replica_group
        self._device = device
        if self.count > 1 and device.type == "cuda" and "cuda:nccl" not in str(dist.get_backend_config(self._group)):
            self._device = torch.device("cpu")  # gloo: buffers on the host

    @torch.no_grad()
    def sum(self, shards: Sequence[Parts]) -> None:
        """Own parts become their sums over the replicas; a shard in one part becomes its sum on all of them.

        Only after a barrier.
        """
        self._sum_parts([parts for parts in shards if len(parts) > 1])
        self._sum_whole([parts[0] for parts in shards if len(parts) == 1])

    def _sum_parts(self, shards: Sequence[Parts]) -> None:
        """Adds in the replicas' order; other parts don't change."""
        for dtype, bucket, size in self._buckets(shards):
            sent = torch.zeros(self.count, size, dtype=dtype, device=self._device)
            _copy(
                (row[at : at + len(chunk)], chunk)
                for at, chunks in bucket
                for row, chunk in zip(sent, chunks, strict=True)
            )
            received = torch.empty_like(sent)
            self._run("the sum over replicas", dist.all_to_all_single, received.view(-1), sent.view(-1))
            total = received[0]
            for theirs in received[1:]:
                total += theirs
            own = ((at, chunks[self.index]) for at, chunks in bucket)
            _copy((chunk, total[at : at + len(chunk)]) for at, chunk in own)

    def _sum_whole(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            for part in tensor.view(-1).split(max(_BUFFER_BYTES // tensor.itemsize, 1)):
                summed = part.to(self._device, copy=True)
                self._run("the sum over replicas", dist.all_reduce, summed)
                part.copy_(summed)

    @torch.no_grad()
    def gather(self, shards: Sequence[Parts]) -> None:
        """Sends every replica's own part to all others, once all of them have arrived."""
        self._gathers += 1
        self._reached.show(self._gathers)
        self._barrier.wait_for("the exchange between replicas after a step", self._yet_to_gather)
        for dtype, bucket, size in self._buckets(shards):
            mine = torch.zeros(size, dtype=dtype, device=self._device)
            own = ((at, chunks[self.index]) for at, chunks in bucket)
            _copy((mine[at : at + len(chunk)], chunk) for at, chunk in own)
            received = torch.empty(self.count, size, dtype=dtype, device=self._device)
            self._run("the exchange between replicas", dist.all_gather, list(received), mine)
            _copy(
                (chunk, received[replica, at : at + len(chunk)])
                for at, chunks in bucket
                for replica, chunk in enumerate(chunks)
                if replica != self.index
            )

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies replica 0's `tensor` into that of every other replica, whatever its dtype. After a barrier."""
        for part in tensor.view(-1).view(torch.uint8).split(_BUFFER_BYTES) if tensor.numel() else ():
            sent = part.to(self._device, copy=True)
            self._run("initial values of other replicas", dist.broadcast, sent, group_src=0)
            if self.index > 0:
                part.copy_(sent)

    def _buckets(self, shards: Sequence[Parts]) -> Iterator[tuple[torch.dtype, list[_Chunk], int]]:
        """By dtype, the chunks that fill one buffer, and the buffer's elements for one replica."""
        for dtype in dict.fromkeys(parts[0].dtype for parts in shards):
            limit = max(_BUFFER_BYTES // dtype.itemsize // self.count, 1)
            bucket: list[_Chunk] = []
            used = 0
            for parts in shards:
                if parts[0].dtype != dtype:
                    continue
                flat = [part.view(-1) for part in parts]
                first, size = 0, max(map(len, flat))
                while first < size:
                    count = min(size - first, limit - used)
                    bucket.append((used, [each[first : first + count] for each in flat]))
                    first, used = first + count, used + count
                    if used == limit:
                        yield dtype, bucket, used
                        bucket, used = [], 0
            if bucket:
                yield dtype, bucket, used

    def _yet_to_gather(self) -> list[int]:
        seen = self._reached.seen()
        return [rank for rank in self._grid.twins if seen[rank] < self._gathers]

    def _run(self, purpose: str, collective: Callable, *tensors: Any, **options: Any) -> None:
        others = [rank for rank in self._grid.twins if rank != self._grid.rank]
        try:
            work = collective(*tensors, group=self._group, async_op=True, **options)
            self._barrier.wait_for(purpose, lambda: [] if work.is_completed() else others)
            work.wait()
        except OdcError:
            # When the process ends, the group's destructor would wait for a collective that may never end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            raise
        except RuntimeError as error:  # a connection of the process group broke
            self._barrier.raise_lost(purpose, others, error)
