"""A linear layer whose weight is on the peers: tiles are read from their owners inside the loop.

    y[t, o n + i] = sum_k x[t, k] W_o[i, k] + b_o[i]
    dx[t, k]      = sum_o sum_i dy[t, o n + i] W_o[i, k]

T tokens, N output features, n = ceil(N / R) of them per owner, K input features; R owners. This is the kernel for
`direct`: each weight tile crosses the link once per block of tokens, so it is for few tokens. Programs that share a
weight tile (those of all blocks of tokens) are neighbours, and this rank's shard comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, default_tile, dot, load_block, peer_address, store_block, tile_options
from .peers import PeerShards, check_apart, check_bias, check_matrix, check_tensor, join
from .tiles import LinearTile

if TYPE_CHECKING:
    from .staged import StagedWeight


@triton.jit(do_not_specialize=["tokens", "rank"])
def linear_kernel(
    x,
    w_table,
    b_table,
    y,
    tokens,
    rows,
    rows_per_owner,
    columns,
    rank,
    world,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    owner = (rank + tl.program_id(2)) % world  # own shard first: it is here already
    first_row = owner.to(tl.int64) * rows_per_owner
    owned = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner)
    if tl.program_id(1) * BLOCK_N < owned:
        t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        weight = peer_address(w_table, owner, DTYPE)
        acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        for start in range(0, columns, BLOCK_K):
            k_in = start + k < columns
            x_TK = load_block(x, columns, t, t < tokens, start + k, k_in)
            w_NK = load_block(weight, columns, n, n < owned, start + k, k_in)
            acc = dot(x_TK, tl.trans(w_NK), acc, UPCAST)
        if HAS_BIAS:
            acc += tl.load(peer_address(b_table, owner, DTYPE) + n, mask=n < owned, other=0.0).to(tl.float32)[None, :]
        store_block(y, rows, t, t < tokens, first_row + n, n < owned, acc)


@triton.jit(do_not_specialize=["tokens", "rank"])
def linear_dx_kernel(
    dy,
    w_table,
    dx,
    tokens,
    rows,
    rows_per_owner,
    columns,
    rank,
    world,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
    for index in range(world):
        owner = (rank + index) % world
        first_row = tl.cast(owner, tl.int64) * rows_per_owner
        owned = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner)
        weight = peer_address(w_table, owner, DTYPE)
        for start in range(0, owned, BLOCK_N):
            row = start + n
            dy_TN = load_block(dy, rows, t, t < tokens, first_row + row, row < owned)
            w_NK = load_block(weight, columns, row, row < owned, k, k < columns)
            acc = dot(dy_TN, w_NK, acc, UPCAST)
    store_block(dx, columns, t, t < tokens, k, k < columns, acc)


def linear(
    *,
    x: torch.Tensor,
    weight: PeerShards,
    bias: PeerShards | None = None,
    out: torch.Tensor,
    tile: LinearTile | None = None,
) -> None:
    """Writes y = x Wᵀ + b into `out`, reading the weight's rows from their owners.

    Two ranks own W = [[1, 0], [0, 1], [1, 1]]: rank 0 two rows, rank 1 the last. x = [[2, 5]] gives out = [[2, 5, 7]]:
    columns 0 and 1 from rank 0's memory, column 2 from rank 1's.

    x: [T, K], weight: [N, K], bias: [N], out: [T, N], all of one dtype; T may be 0.
    tile: sizes of the kernel's tiles, by default chosen from shapes and dtypes.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    check_linear("x", x, out, weight, columns_of=1)
    if bias is not None:
        check_bias(bias, weight)
    tokens = x.shape[0]
    if tokens == 0 or weight.shape[0] == 0:
        return
    tile = tile or default_tile("linear", x)
    grid = triton.cdiv(tokens, tile.t), triton.cdiv(weight.rows_per_owner, tile.n), weight.world
    linear_kernel[grid](
        x,
        weight.table,
        weight.table if bias is None else bias.table,
        out,
        tokens,
        *weight.layout,
        DTYPE=TL_DTYPES[x.dtype],
        HAS_BIAS=bias is not None,
        **tile_options(tile),
    )


def linear_dx(*, dy: torch.Tensor, weight: PeerShards, out: torch.Tensor, tile: LinearTile | None = None) -> None:
    """Writes dx = dy W into `out`, reading the weight's rows from their owners.

    With W as in `linear`, dy = [[1, 1, 1]] gives out = [[2, 2]]: [1, 1] of rank 0's two rows, and [1, 1] of rank 1's.

    dy: [T, N], weight: [N, K], out: [T, K], all of one dtype; T may be 0.
    tile: sizes of the kernel's tiles, by default chosen from shapes and dtypes.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    check_linear("dy", dy, out, weight, columns_of=0)
    tokens, columns = out.shape
    if tokens == 0 or columns == 0:
        return
    tile = tile or default_tile("linear_dx", dy)
    linear_dx_kernel[(triton.cdiv(tokens, tile.t), triton.cdiv(columns, tile.k))](
        dy, weight.table, out, tokens, *weight.layout, DTYPE=TL_DTYPES[dy.dtype], **tile_options(tile)
    )


def check_linear(
    name: str, value: torch.Tensor, out: torch.Tensor, weight: PeerShards | StagedWeight, *, columns_of: int
) -> None:
    """Raises ValueError unless `value` has as many columns as the weight's dimension `columns_of`, `out` as the other
    one, and both are contiguous, of the weight's dtype, and on its device.
    """
    check_matrix(weight)
    alike = {"dtype": weight.dtype, "device": weight.device}
    check_tensor(name, value, shape=(*value.shape[:1], weight.shape[columns_of]), **alike)
    check_tensor("out", out, shape=(len(value), weight.shape[1 - columns_of]), **alike)
    check_apart("out", out, value, weight if isinstance(weight, PeerShards) else weight.buffer)


def linear_ref(x: torch.Tensor, weight: list[torch.Tensor], bias: list[torch.Tensor] | None) -> torch.Tensor:
    """y in plain torch, over all owners' shards, in float64."""
    y = x.double() @ join(weight).double().T
    return y if bias is None else y + join(bias).double()


def linear_dx_ref(dy: torch.Tensor, weight: list[torch.Tensor]) -> torch.Tensor:
    """dx in plain torch, over all owners' shards, in float64."""
    return dy.double() @ join(weight).double()
