"""gather and scatter under Triton's interpreter, against plain torch over all owners' shards."""

from __future__ import annotations

import pytest
import torch

from . import place  # isort: skip

from odc_kernels.gather import gather, gather_ref
from odc_kernels.peers import PeerShards, join, split
from odc_kernels.scatter import scatter, scatter_ref

pytestmark = place.MARKS
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
