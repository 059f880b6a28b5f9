"""Copies tensors from rank 0 to all ranks in bounded memory: in rounds through a temporary shared buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.errors import OdcError
from .barrier import Barrier
from .layout import Region, aligned
from .memory.shm import SharedMemoryHeap
from .replicas import Replicas

_HALF_BYTES = 128 * 2**20

Take = Callable[[int, torch.Tensor], None]  # of the flattened tensor: the first element's index, elements from there


class Relay:
    """All ranks `send` the same tensors in the same order; rank 0's values arrive everywhere, itself included.

    The buffer has two halves: rank 0 fills one while the others read the other, so a round takes one barrier.
    `sizes`: bytes of each tensor; the buffer is no larger than they all need. `rank` and `world`: within the replica,
    whose rank 0 gets each tensor from the first replica's, and then fills the buffer; `barrier`: of all replicas.
    """

    def __init__(
        self,
        *,
        purpose: str,
        sizes: list[int],
        token: str,
        barrier: Barrier,
        replicas: Replicas,
        rank: int,
        world: int,
    ) -> None:
        self._purpose, self._barrier, self._replicas, self._fills = purpose, barrier, replicas, rank == 0
        self._half_bytes = min(_HALF_BYTES, sum(map(aligned, sizes)))
        self._half, self._used_bytes = 0, 0
        self._arrivals: list[tuple[Take, int, torch.Tensor]] = []
        self._buffer: SharedMemoryHeap | None = None
        if self._half_bytes:
            sizes = {"size_bytes": 2 * self._half_bytes, "slots": 0}
            timeout_s = barrier.timeout_s
            self._buffer = SharedMemoryHeap(rank=rank, world=world, token=token, timeout_s=timeout_s, **sizes)

    def before_sending(self) -> None:
        """With several replicas, called before some tensors: nobody waits in a collective for a rank that failed."""
        if self._replicas.count > 1:
            self.exchange()

    def of_first(self, value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Rank 0's `value`, on each replica's rank 0; else None."""
        return self._replicas.broadcast(value, shape, dtype) if self._fills else None

    @torch.no_grad()
    def send(self, shape: torch.Size, dtype: torch.dtype, value: torch.Tensor | None, take: Take | None) -> None:
        """Sends `value`, what `of_first` gave; each rank's `take`, if any, gets it in pieces."""
        elements, first = shape.numel(), 0
        flat = value.reshape(-1) if self._fills else None
        while first < elements:
            fitting = (self._half_bytes - self._used_bytes) // dtype.itemsize
            if fitting <= 0:
                self._turn()
                continue
            count = min(elements - first, fitting)
            region = Region(
                shape=(count,),
                dtype=str(dtype).removeprefix("torch."),
                itemsize=dtype.itemsize,
                offset_bytes=self._half * self._half_bytes + self._used_bytes,
            )
            piece = self._buffer.whole(region)
            if flat is not None:
                piece.copy_(flat[first : first + count])
            if take is not None:
                self._arrivals.append((take, first, piece))
            self._used_bytes += aligned(region.size_bytes)
            first += count

    def _turn(self) -> None:
        self.exchange()
        for take, first, piece in self._arrivals:
            take(first, piece)
        self._arrivals.clear()
        self._half, self._used_bytes = 1 - self._half, 0

    def finish(self) -> None:
        """Passes on what is left; afterwards every rank has everything."""
        self._turn()

    def exchange(self, message: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """A barrier. Raises OdcError on every rank if a rank called `fail`."""
        messages = self._barrier.exchange(self._purpose, {"error": None, **(message or {})})
        for rank, theirs in enumerate(messages):
            if theirs["error"] is not None:
                raise OdcError(f"{self._purpose} failed on rank {rank}: {theirs['error']}")
        return messages

    def fail(self, error: Exception) -> None:
        """Tells the other ranks, which would otherwise wait for this one until their deadline."""
        if not isinstance(error, OdcError):
            self._barrier.post(self._purpose, {"error": f"{type(error).__name__}: {error}"})

    def close(self) -> None:
        self._arrivals.clear()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
