"""The heap on a GPU: real processes that read and add to each other's memory through torch's symmetric memory.

One GPU is enough. Where there are several, ranks take one each, and what all of them add to is tried on one, too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from odc_triton.comm.layout import ALIGNMENT_BYTES, Region
from odc_triton.comm.memory.cuda import CudaHeap
from odc_triton.comm.memory.heap import Status
from tests.gpu.marks import MARKS, ONE_GPU, gpu_of, take_gpu
from tests.support import ranks

pytestmark = MARKS
ROUNDS = 20


def _open(rank: int, world: int, size_bytes: int, *, one_gpu: bool = False) -> CudaHeap:
    take_gpu(rank, one_gpu=one_gpu)
    gpus = [gpu_of(peer, one_gpu=one_gpu) for peer in range(world)]
    heap = CudaHeap(
        rank=rank,
        world=world,
        size_bytes=size_bytes,
        token="tests",
        timeout_s=60,
        group=dist.group.WORLD,
        shared_device=len(set(gpus)) < world,
    )
    heap.near = frozenset(peer for peer in range(world) if gpus[peer] == gpus[rank])
    dist.barrier()
    return heap


def _region(shape: tuple[int, ...], offset_bytes: int = 0, dtype: str = "float32") -> Region:
    return Region(shape=shape, dtype=dtype, itemsize=getattr(torch, dtype).itemsize, offset_bytes=offset_bytes)


def _read_peers(rank: int, world: int) -> tuple:
    heap = _open(rank, world, 4096)
    status = Status(heap)
    region = _region((7, 5), offset_bytes=ALIGNMENT_BYTES)
    zeros = [bool((heap.shard(region, owner) == 0).all()) for owner in range(world)]
    dist.barrier()
    heap.shard(region, rank).fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier()
    seen = [heap.shard(region, owner).cpu() for owner in range(world)]
    status.show(rank + 10)
    dist.barrier()
    return zeros, seen, status.seen(), [heap.is_alive(peer) for peer in range(world)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_read_each_other(world: int) -> None:
    for zeros, seen, words, alive in ranks.run(_read_peers, world):
        assert zeros == alive == [True] * world
        for owner, shard in enumerate(seen):
            assert shard.shape[1] == 5
            assert (shard == owner + 1).all()
        assert sum(len(shard) for shard in seen) == 7
        assert words == [rank + 10 for rank in range(world)]


def _contend(
    rank: int, world: int, one_gpu: bool, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every rank adds small integers into the same shards at the same time, by every kernel that adds."""
    from odc_kernels.embedding import embedding_grad
    from odc_kernels.peers import ExactAdds, PeerShards
    from odc_kernels.scatter import scatter
    from odc_kernels.wgrad import wgrad

    heap = _open(rank, world, 12 * 2**20, one_gpu=one_gpu)
    dtype = "int64" if exact else "float32"
    flat, matrix = _region((1001, 64), 0, dtype), _region((250, 256), 4 * 2**20, dtype)
    words = _region((97, 64), 8 * 2**20, dtype)
    largest = torch.zeros(1, dtype=torch.int32, device="cuda")
    adds = ExactAdds(factor=2.0**20, largest=largest) if exact else None

    def peers(shards: list[torch.Tensor], region: Region) -> PeerShards:
        return replace(PeerShards.of(shards, shape=region.shape, rank=rank, near=heap.near), exact=adds)

    scattered = [heap.shard(flat, owner) for owner in range(world)]
    multiplied = [heap.shard(matrix, owner) for owner in range(world)]
    embedded = [heap.shard(words, owner) for owner in range(world)]
    ids, of_ids = _tokens(rank), _integers(500, 64, rank + 20).cuda()
    gradient = (torch.arange(1001 * 64, device="cuda").view(1001, 64) % 7).float()
    dy, x = _integers(64, 250, rank), _integers(64, 256, rank + 10)
    torch.cuda.synchronize()
    dist.barrier()
    for _ in range(ROUNDS):
        scatter(gradient=gradient, peers=peers(scattered, flat))
        wgrad(dy=dy.cuda().bfloat16(), x=x.cuda().bfloat16(), weight=peers(multiplied, matrix))
        embedding_grad(dy=of_ids, ids=ids.cuda(), weight=peers(embedded, words))
    torch.cuda.synchronize()
    dist.barrier()
    result = torch.cat(scattered).cpu(), torch.cat(multiplied).cpu(), torch.cat(embedded).cpu()
    dist.barrier()  # nobody's memory goes while it is still read
    if not exact:
        return result
    assert 6 <= largest.view(torch.float32).item() <= 500 * 3
    return tuple((each.double() / 2**20).float() for each in result)


def _tokens(rank: int) -> torch.Tensor:
    ids = torch.randint(0, 97, (500,), generator=torch.Generator().manual_seed(rank))
    ids[:200] = 5
    return ids


def _integers(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()


def check_additions(world: int, *, one_gpu: bool, exact: bool = False) -> None:
    # Integers below 2^24: fp32 sums are exact in any order too, so a lost addition shows.
    scattered = (torch.arange(1001 * 64).view(1001, 64) % 7).float() * ROUNDS * world
    multiplied = sum(ROUNDS * _integers(64, 250, rank).T @ _integers(64, 256, rank + 10) for rank in range(world))
    embedded = torch.zeros(97, 64)
    for rank in range(world):
        embedded.index_add_(0, _tokens(rank), ROUNDS * _integers(500, 64, rank + 20))
    for found in ranks.run(_contend, world, one_gpu, exact):
        for got, want in zip(found, (scattered, multiplied, embedded), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@ONE_GPU
def test_additions_are_exact(world: int, one_gpu: bool, exact: bool) -> None:
    check_additions(world, one_gpu=one_gpu, exact=exact)
