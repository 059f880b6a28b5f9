"""gather and scatter under Triton's interpreter, against plain torch over all owners' shards."""

from __future__ import annotations

import pytest
import torch

from . import interpret  # noqa: F401  isort: skip

from odc_kernels.gather import gather, gather_ref
from odc_kernels.peers import PeerShards, join, split
from odc_kernels.scatter import scatter, scatter_ref
from tests import ranks

WORLDS = [1, 2, 3, 4, 8]
SHAPES = [(16, 8), (7, 5), (1, 3), (3,), (9, 2, 3), (5, 0), (0, 4), (64, 33)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
def test_gather(world: int, shape: tuple, source: torch.dtype, target: torch.dtype) -> None:
    shards = split(torch.randn(shape).to(source), world)
    for rank in {0, world - 1}:
        out = torch.full(shape, torch.nan, dtype=target)
        gather(peers=PeerShards.of(shards, shape=shape, rank=rank), out=out, block=64)
        # The interpreter cuts fp32 off to bf16 where a GPU rounds to nearest: one unit in the last of 8 bits.
        rtol = 2**-7 if target == torch.bfloat16 != source else 0
        torch.testing.assert_close(out, gather_ref(shards, target), rtol=rtol, atol=0)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scatter(world: int, shape: tuple, dtype: torch.dtype) -> None:
    shards = split(torch.randn(shape), world)
    gradient = torch.randn(shape).to(dtype)
    want = scatter_ref(shards, gradient, 0.5)
    scatter(gradient=gradient, peers=PeerShards.of(shards, shape=shape, rank=world - 1), scale=0.5, block=64)
    # One fp32 product and one sum per element, in the same order: equal but for a fused multiply-add.
    torch.testing.assert_close(join(shards), join(want), rtol=1e-6, atol=1e-6)


def _contend(rank: int, world: int) -> torch.Tensor:
    """Every rank adds small integers into the same shards on the shared heap, many times, all at once."""
    import torch.distributed as dist

    from odc_triton.memory import SharedMemoryHeap
    from odc_triton.plan import Region

    region = Region(shape=(11, 16), dtype="float32", itemsize=4, offset_bytes=0)
    heap = SharedMemoryHeap(rank=rank, world=world, size_bytes=4096, slots=1, token="contend", timeout_s=30)
    shards = [heap.shard(region, owner) for owner in range(world)]
    peers = PeerShards.of(shards, shape=region.shape, rank=rank)
    gradient = torch.arange(11 * 16, dtype=torch.float32).view(11, 16) % 7
    dist.barrier()
    for _ in range(20):
        scatter(gradient=gradient, peers=peers, block=32)
    dist.barrier()
    return heap.whole(region).clone()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_add_at_the_same_time(world: int) -> None:
    # Integers below 2^24: sums are exact in any order, so a lost addition shows.
    want = torch.arange(11 * 16, dtype=torch.float32).view(11, 16) % 7 * 20 * world
    for got in ranks.run(_contend, world):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out": torch.empty(4, 4)}, "give a contiguous"),
        ({"out": torch.empty(4, 8).t()}, "give a contiguous"),
        ({"out": torch.empty(8, 4, dtype=torch.int32)}, "floating-point"),
        ({"out": torch.empty(8, 4, device="meta")}, "on meta"),
    ],
)
def test_gather_refuses(change: dict, words: str) -> None:
    peers = PeerShards.of(split(torch.randn(8, 4), 2), shape=(8, 4))
    with pytest.raises(ValueError, match=words):
        gather(**{"peers": peers, "out": torch.empty(8, 4)} | change)


@pytest.mark.parametrize(
    ("gradient", "dtype", "words"),
    [
        (torch.empty(4, 4), torch.float32, "give a contiguous"),
        (torch.empty(8, 4), torch.bfloat16, "summed in float32"),
        (torch.empty(8, 4, dtype=torch.float64), torch.float32, "gradient is torch.float64"),
        (torch.empty(8, 4, device="meta"), torch.float32, "on meta"),
    ],
)
def test_scatter_refuses(gradient: torch.Tensor, dtype: torch.dtype, words: str) -> None:
    peers = PeerShards.of(split(torch.randn(8, 4).to(dtype), 2), shape=(8, 4))
    with pytest.raises(ValueError, match=words):
        scatter(gradient=gradient, peers=peers)


@pytest.mark.parametrize(
    ("shards", "shape", "words"),
    [
        ([], (4,), "empty"),
        ([torch.zeros(2)], (), "scalar"),
        ([torch.zeros(3), torch.zeros(1)], (4,), "shape"),
        ([torch.zeros(2), torch.zeros(2).half()], (4,), "must agree"),
        ([torch.zeros(2, 2).t(), torch.zeros(2, 2)], (4, 2), "contiguous"),
        ([torch.zeros(3)[1:], torch.zeros(2)], (4,), "align it"),
    ],
)
def test_peers_refuse(shards: list, shape: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PeerShards.of(shards, shape=shape)
