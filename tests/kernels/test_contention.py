"""Ranks that add into the same shards on the shared heap at the same time, through interpreted kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.embedding import EmbeddingGradTile, embedding_grad
from odc_kernels.peers import ExactAdds, PeerShards
from odc_kernels.scatter import scatter
from odc_kernels.tiles import WgradTile
from odc_kernels.wgrad import wgrad
from tests.support import ranks
from tests.support.deadlines import LONG_S

pytestmark = pytest.mark.skipif(not place.INTERPRETED, reason="tests/gpu/test_cuda_heap.py does it on GPUs")
TILE, GRAD_TILE = WgradTile(n=16, k=16, t=16, group=2), EmbeddingGradTile(t=2, k=16, segment=8)
WORLD, SHAPE = 3, (11, 16)


def _integers(rows: int, columns: int, rank: int) -> torch.Tensor:
    return torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(rank)).float()


def _ids(rank: int) -> torch.Tensor:
    """Of 20 tokens, of which 12 are the same."""
    ids = torch.randint(0, SHAPE[0], (20,), generator=torch.Generator().manual_seed(rank))
    ids[:12] = 5
    return ids


def _scattered(rank: int) -> torch.Tensor:
    return _integers(*SHAPE, rank)


def _multiplied(rank: int) -> torch.Tensor:
    return _integers(6, SHAPE[0], rank).T @ _integers(6, SHAPE[1], rank + 10)


def _embedded(rank: int) -> torch.Tensor:
    return torch.zeros(SHAPE).index_add_(0, _ids(rank), _integers(20, SHAPE[1], rank))


def _multiply(rank: int, weight: PeerShards) -> None:
    wgrad(dy=_integers(6, SHAPE[0], rank), x=_integers(6, SHAPE[1], rank + 10), weight=weight, tile=TILE)


# By name: the rounds, what one call of a rank adds, and the call, which gets the rank and the shards.
CASES: dict[str, tuple[int, Callable[[int], torch.Tensor], Callable[[int, PeerShards], None]]] = {
    "scatter": (12, _scattered, lambda rank, w: scatter(gradient=_scattered(rank), peers=w, block=32)),
    "wgrad": (6, _multiplied, _multiply),
    "embedding": (
        4,
        _embedded,
        lambda rank, w: embedding_grad(dy=_integers(20, SHAPE[1], rank), ids=_ids(rank), weight=w, tile=GRAD_TILE),
    ),
}
EXACT = {"fp32": None, "exact": 2.0**40}


def _adds(rank: int, world: int) -> dict[tuple[str, str], torch.Tensor]:
    """Every rank adds small integers into the same shards on the shared heap, many times, all at once."""
    import torch.distributed as dist

    from odc_triton.comm.layout import Region
    from odc_triton.comm.memory.heap import SharedMemoryHeap

    found = {}
    for name, (rounds, _, add) in CASES.items():
        for kind, factor in EXACT.items() if name == "scatter" else [("fp32", None)]:
            dtype, size = ("float32", 4) if factor is None else ("int64", 8)
            region = Region(shape=SHAPE, dtype=dtype, itemsize=size, offset_bytes=0)
            given = {"size_bytes": 4096, "locks": 1, "token": f"contend {name} {kind}", "timeout_s": LONG_S}
            heap = SharedMemoryHeap(rank=rank, world=world, **given)
            peers = PeerShards.of([heap.shard(region, owner) for owner in range(world)], shape=SHAPE, rank=rank)
            if factor is not None:
                exact = ExactAdds(factor=factor, largest=torch.zeros(1, dtype=torch.int32))
                peers = replace(peers, exact=exact)
            dist.barrier()
            for _ in range(rounds):
                add(rank, peers)
            dist.barrier()
            found[name, kind] = heap.whole(region).clone()
    return found


def test_no_addition_is_lost() -> None:
    # Integers below 2^24: fp32 sums are exact in any order too.
    for found in ranks.run(_adds, WORLD):
        for (name, kind), got in found.items():
            rounds, added, _ = CASES[name]
            want = sum(rounds * added(rank) for rank in range(WORLD))
            assert torch.equal(got, want if kind == "fp32" else want.long() * 2**40), (name, kind)
        assert found.keys() == {*((name, "fp32") for name in CASES), ("scatter", "exact")}
