"""Ranks that add into the same shards on the shared heap at the same time, through interpreted kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.peers import ExactAdds, PeerShards
from odc_kernels.scatter import scatter
from odc_kernels.tiles import WgradTile
from odc_kernels.wgrad import wgrad
from tests.support import ranks
from tests.support.deadlines import LONG_S

pytestmark = pytest.mark.skipif(not place.INTERPRETED, reason="tests/gpu/test_cuda_heap.py does it on GPUs")
WGRAD_TILE = WgradTile(n=16, k=16, t=16, group=2)


def _scatters(rank: int, world: int, exact: bool) -> torch.Tensor:
    """Every rank adds small integers into the same shards on the shared heap, many times, all at once."""
    import torch.distributed as dist

    from odc_triton.comm.layout import Region
    from odc_triton.comm.memory import SharedMemoryHeap

    region = Region(shape=(11, 16), dtype="int64" if exact else "float32", itemsize=8 if exact else 4, offset_bytes=0)
    heap = SharedMemoryHeap(rank=rank, world=world, size_bytes=4096, slots=1, token="contend", timeout_s=LONG_S)
    shards = [heap.shard(region, owner) for owner in range(world)]
    adds = ExactAdds(factor=2.0**40, largest=torch.zeros(1, dtype=torch.int32)) if exact else None
    peers = replace(PeerShards.of(shards, shape=region.shape, rank=rank), exact=adds)
    gradient = torch.arange(11 * 16, dtype=torch.float32).view(11, 16) % 7
    dist.barrier()
    for _ in range(20):
        scatter(gradient=gradient, peers=peers, block=32)
    dist.barrier()
    return heap.whole(region).clone()


@pytest.mark.parametrize(("world", "exact"), [(2, False), (3, False), (3, True)])
def test_scatter(world: int, exact: bool) -> None:
    # Integers below 2^24: fp32 sums are exact in any order too, so a lost addition shows.
    want = torch.arange(11 * 16, dtype=torch.float32).view(11, 16) % 7 * 20 * world
    for got in ranks.run(_scatters, world, exact):
        assert torch.equal(got, want.long() * 2**40 if exact else want)


def _wgrads(rank: int, world: int) -> torch.Tensor:
    """Every rank's tiles into the same shards on the shared heap, all at once: small integers, so sums are exact."""
    import torch.distributed as dist

    from odc_triton.comm.layout import Region
    from odc_triton.comm.memory import SharedMemoryHeap

    region = Region(shape=(20, 16), dtype="float32", itemsize=4, offset_bytes=0)
    heap = SharedMemoryHeap(rank=rank, world=world, size_bytes=4096, slots=1, token="contend", timeout_s=LONG_S)
    shards = [heap.shard(region, owner) for owner in range(world)]
    peers = PeerShards.of(shards, shape=region.shape, rank=rank)
    dy, x = _integers(6, 20, rank), _integers(6, 16, rank + 10)
    dist.barrier()
    for _ in range(10):
        wgrad(dy=dy, x=x, weight=peers, tile=WGRAD_TILE)
    dist.barrier()
    return heap.whole(region).clone()


def _integers(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("world", [2, 3])
def test_wgrad(world: int) -> None:
    want = sum(10 * _integers(6, 20, rank).T @ _integers(6, 16, rank + 10) for rank in range(world))
    for got in ranks.run(_wgrads, world):
        assert torch.equal(got, want)
