"""What the benchmark knows of an operator, and one problem that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from odc_kernels.peers import PeerShards, split

from .models import Layer, Model
from .place import DEVICE

Run = Callable[[], Any]
# Name of a result, what a kernel made of it (or of a part), what it ought to be.
Results = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
CHUNK = 2048  # tokens that are checked at a time: a reference in float64 is four times as large as a result


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer of one model, seen from rank 0 of `world`. `peers`: "loopback" (all shards on this device) or "pinned"
    (all but the own one in pinned host memory). Tensors are new random numbers in every call: never zeros, on which a
    GPU runs faster.
    """

    model: Model
    layer: Layer
    tokens: int  # 0 where the operator has none
    world: int
    dtype: torch.dtype
    peers: str = "loopback"
    rank: int = 0

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def own_rows(self) -> int:
        return -(-self.layer.rows // self.world)

    @property
    def remote_rows(self) -> int:
        return self.layer.rows - self.own_rows

    def tensor(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal random numbers of that deviation, of the problem's dtype if no other is given."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype).mul_(scale)

    def weight(self) -> torch.Tensor:
        """[N, K], scaled so that a product with it keeps the size of its input."""
        return self.tensor(self.layer.rows, self.layer.columns, scale=self.layer.columns**-0.5)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=self.device, dtype=dtype or self.dtype)

    def shards(self, whole: torch.Tensor) -> PeerShards:
        """Copies of a whole tensor's rows, each where its owner's memory is."""
        parts = split(whole, self.world)
        if self.peers == "pinned":
            parts = [
                part if owner == self.rank or not part.numel() else part.cpu().pin_memory()
                for owner, part in enumerate(parts)
            ]
        return PeerShards.of(parts, shape=whole.shape, rank=self.rank, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least that one call must do. `link_bytes` go to or from the peers; `peer_bytes` is what that costs the peers'
    own memory (a sum is read and written there): in loopback it is this GPU's.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0
    peer_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A problem's tensors, and what runs on them.

    `run`: one call of ours. `check`: runs it on poisoned or known outputs and yields the results beside plain torch.
    `baselines`: one call each of what it is compared with, by name. `whole_bytes`: what ours never holds as a whole
    (logits), for the peak of its memory to be compared with.
    """

    run: Run
    check: Callable[[], Results]
    baselines: Mapping[str, Run]
    work: Work
    whole_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`kernels`: the files of kernels/ that it measures. `has_tokens`: False where only the weight's shape counts.
    `most_tokens`: what it is meant for. `reduces`: adds into peers.
    """

    name: str
    kernels: tuple[str, ...]
    layers: Callable[[Model], list[Layer]]
    prepare: Callable[[Problem], Prepared]
    has_tokens: bool = True
    most_tokens: int = 65536
    reduces: bool = False


def added(
    problem: Problem, before: torch.Tensor, peers: PeerShards
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows, what an owner holds now, what it held before) for every owner that has rows; both on the device."""
    first = 0
    for shard in peers.shards:
        rows = slice(first, first + len(shard))
        first += len(shard)
        if len(shard):
            yield rows, shard.to(problem.device), before[rows]
