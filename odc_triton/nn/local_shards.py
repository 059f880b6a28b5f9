"""A parameter split over owners that all lie in this process: what operators run on without ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from odc_kernels.peers import PeerShards, split
from odc_kernels.staged import StagedWeight

from .choice import TABLE
from .handles import handle_of
from .on_owners import AddRows, add_rows
from .staging import Staging


class LocalShards:
    """What operators ask of a sharded parameter (`OnOwners`), for a check of them without ranks.

    `leaf`: an ordinary parameter [N, ...]; within `with`, operators read a copy of it from `world` owners and add its
    gradient to `gradient`, fp32 [N, ...], instead of giving it to autograd. `by_kernels`: whether kernels may add it;
    by default on a GPU.
    """

    def __init__(self, leaf: torch.Tensor, world: int = 1, *, by_kernels: bool | None = None) -> None:
        self.leaf, self.world, self.shape, self.dtype = leaf, world, tuple(leaf.shape), leaf.dtype
        self.table = TABLE
        self._shards = split(leaf.detach(), world)
        wide = torch.promote_types(leaf.dtype, torch.float32)
        self._gradient_shards = split(torch.zeros_like(leaf, dtype=wide, requires_grad=False), world)
        self._each = -(-self.shape[0] // world)
        self._staging = Staging()
        self._by_kernels = leaf.is_cuda if by_kernels is None else by_kernels
        self._touched = False

    def __enter__(self) -> LocalShards:
        self.leaf._odc_handle = handle_of(self)
        return self

    def __exit__(self, *_: object) -> None:
        del self.leaf._odc_handle

    @property
    def gradient(self) -> torch.Tensor | None:
        """What was added; None where nothing was."""
        return torch.cat(self._gradient_shards) if self._touched else None

    # ------------------------------------------------------------------ as operators see it

    @property
    def compute_peers(self) -> PeerShards:
        return PeerShards.of(self._shards, shape=self.shape, aligned=self.leaf.is_cuda)

    def parts(self, strategy: str) -> list[torch.Tensor]:
        return self._shards if strategy == "direct" else [self.read()]

    def read(self) -> torch.Tensor:
        return torch.cat(self._shards)

    def pull(self) -> StagedWeight:
        return self._staging.pull(self.compute_peers)

    def first_row(self, owner: int) -> int:
        return min(owner * self._each, self.shape[0])

    def owners_from_own(self) -> Iterator[int]:
        return (owner for owner in range(self.world) if len(self._shards[owner]))

    def wants_gradient(self) -> bool:
        return True  # who makes these asks for it, whatever autograd was asked for

    def open_sink(self) -> PeerShards | AddRows:
        self._touched = True
        if self._by_kernels:
            return PeerShards.of(self._gradient_shards, shape=self.shape, aligned=self.leaf.is_cuda)
        return self._add_rows

    @torch.no_grad()
    def _add_rows(self, owner: int, at: int | torch.Tensor, rows: torch.Tensor) -> None:
        add_rows(self._gradient_shards[owner], at, rows)

    @torch.no_grad()
    def add_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._touched = True
            rows = gradient.split([len(shard) for shard in self._gradient_shards])
            for shard, own in zip(self._gradient_shards, rows, strict=True):
                shard.add_(own)
