"""linear, its input gradient, and wgrad under Triton's interpreter, against plain torch over all owners' shards."""

from __future__ import annotations

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.linear import linear, linear_dx, linear_dx_ref, linear_ref
from odc_kernels.peers import ALL, PeerShards, join
from odc_kernels.tiles import LinearTile, WgradTile
from odc_kernels.wgrad import wgrad
from tests.support.place import split

pytestmark = place.MARKS

# tokens, output features, input features: odd, one row, one token, no token, owners without rows, more than a tile.
SHAPES = [(5, 7, 3), (1, 16, 16), (33, 20, 18), (0, 4, 4), (4, 1, 5), (17, 3, 40)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = place.matrix(SHAPES, DTYPES, mixed=[(33, 20, 18)])
LINEAR_TILE = LinearTile(t=16, n=16, k=16)
WGRAD_TILE = WgradTile(n=16, k=16, t=16, group=2)

# fp32: a sum of K terms in another order. fp16: products are exact in fp32, one rounding at the end. bf16 likewise,
# but the interpreter cuts off where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    place.close(got, want, TOLERANCE[dtype], least=1.0)


@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_linear(world: int, shape: tuple, dtype: torch.dtype) -> None:
    tokens, rows, columns = shape
    with_bias = world != 8
    x, weight = torch.randn(tokens, columns).to(dtype), split(torch.randn(rows, columns).to(dtype), world)
    bias = split(torch.randn(rows).to(dtype), world) if with_bias else None
    peers = PeerShards.of(weight, shape=(rows, columns), rank=world // 2)
    bias_peers = PeerShards.of(bias, shape=(rows,), rank=world // 2) if with_bias else None
    out = torch.full((tokens, rows), torch.nan, dtype=dtype)
    linear(x=x, weight=peers, bias=bias_peers, out=out, tile=LINEAR_TILE)
    close(out, linear_ref(x, weight, bias), dtype)


@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_linear_dx(world: int, shape: tuple, dtype: torch.dtype) -> None:
    tokens, rows, columns = shape
    dy, weight = torch.randn(tokens, rows).to(dtype), split(torch.randn(rows, columns).to(dtype), world)
    out = torch.full((tokens, columns), torch.nan, dtype=dtype)
    linear_dx(dy=dy, weight=PeerShards.of(weight, shape=(rows, columns), rank=world - 1), out=out, tile=LINEAR_TILE)
    close(out, linear_dx_ref(dy, weight), dtype)


@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_wgrad(world: int, shape: tuple, dtype: torch.dtype) -> None:
    tokens, rows, columns = shape
    with_bias = world != 8
    dy, x = torch.randn(tokens, rows).to(dtype), torch.randn(tokens, columns).to(dtype)
    weight, bias = split(torch.randn(rows, columns), world), split(torch.randn(rows), world)
    want_weight = (join(weight) + 0.5 * (dy.double().T @ x.double())).float()
    want_bias = (join(bias) + 0.5 * dy.double().sum(0)).float()
    before = join(bias).clone()
    wgrad(
        dy=dy,
        x=x,
        weight=PeerShards.of(weight, shape=(rows, columns), rank=world // 2, near=ALL),
        bias=PeerShards.of(bias, shape=(rows,), rank=world // 2) if with_bias else None,
        scale=0.5,
        tile=WGRAD_TILE,
    )
    # Accumulated in fp32 whatever the inputs are.
    close(join(weight), want_weight.double(), torch.float32)
    close(join(bias), (want_bias if with_bias else before).double(), torch.float32)
