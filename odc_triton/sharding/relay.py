"""Brings rank 0's tensors to all ranks, through memory that the ranks of a replica share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.barrier import Barrier
from ..comm.layout import place_regions
from ..comm.memory.heap import SymmetricHeap
from ..comm.memory.shm import SharedMemoryHeap
from ..comm.replicas import Replicas
from .agree import all_came
from .collect import dtype_name


class Relay:
    """All ranks make the same calls in the same order, inside `refusing(barrier, purpose)`.

    `heap`: of this replica's ranks; `barrier`: of all replicas'. Rank 0 of the first replica is the source. Each other
    replica's rank 0 gets the tensors from it.
    """

    def __init__(self, purpose: str, *, token: str, heap: SymmetricHeap, barrier: Barrier, replicas: Replicas) -> None:
        self.is_source = barrier.rank == 0
        self._purpose, self._token, self._heap = purpose, token, heap
        self._barrier, self._replicas = barrier, replicas

    def allocate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of these shapes and dtypes, on the host, that the replica's ranks share until all drop them."""
        if not tensors:
            return []
        described = [(tuple(each.shape), dtype_name(each.dtype), each.itemsize) for each in tensors]
        regions, size_bytes = place_regions(described, world=1, apart=False)
        self._all_came()  # nobody waits for the memory of a rank that failed
        memory = SharedMemoryHeap(
            rank=self._heap.rank,
            world=self._heap.world,
            size_bytes=size_bytes,
            slots=0,
            token=f"{self._token}-{self._barrier.passed}",
            timeout_s=self._barrier.timeout_s,
            look=self._look,
        )
        memory.close()  # its tensors stay
        return [memory.whole(region) for region in regions]

    def publish(self, shared: Sequence[torch.Tensor]) -> None:
        """The source has written these tensors, which a replica's ranks share: afterwards all ranks may read them."""
        if self._replicas.count > 1:
            self._all_came()  # nobody waits in a collective for a rank that failed
            if self._heap.rank == 0:
                for tensor in shared:
                    self._replicas.broadcast(tensor)
        self._all_came()

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The source's `tensors`, to be read only. Of the other ranks' tensors only shapes and dtypes matter."""
        shared = self.allocate(tensors)
        if self.is_source:
            for into, tensor in zip(shared, tensors, strict=True):
                into.copy_(tensor)
        self.publish(shared)
        return shared

    def _look(self, ranks: list[int]) -> None:
        """Raises RankLost if one of these ranks of the replica is gone."""
        ranks = [self._heap.first + rank for rank in ranks]
        self._barrier.require_alive(ranks, self._purpose, lambda: ranks)

    def _all_came(self) -> None:
        all_came(self._barrier, self._purpose, call="fully_shard")
