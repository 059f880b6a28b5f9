"""The weight gradient: every tile is added directly into its owner's shard.

    dW_o[i, k] += scale * sum_t dy[t, o n + i] x[t, k]
    db_o[i]    += scale * sum_t dy[t, o n + i]

T tokens, N output features, n = ceil(N / R) of them per owner, K input features; R owners. One program makes one
tile [BLOCK_N, BLOCK_K] of one owner's rows over all tokens. A rank begins with the next rank's rows.

On sm_90 and newer a tile is added by one bulk reduction (`descriptor.atomic_add`) if all owners are near, else by
relaxed atomics: see [Note: bulk reductions] in device.py. The bias's gradient is summed by torch and scattered.

[Note: serial products] ptxas waits for every product of a warp group if something else defines the sums that it adds
to: the sums of a bias next to integers, or with triton 3.6 the zeros of a loop without steps. So neither is here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import (
    add_to_peer,
    adds_in_bulk,
    architecture,
    default_tile,
    dot,
    load_block,
    makes_descriptors,
    sum_address,
    summand,
    tile_options,
    turn,
)
from .peers import COMPUTE_DTYPES, PeerShards, check_bias, check_sums, check_tensor
from .scatter import scatter
from .tiles import WgradTile, of_integers


@triton.jit(do_not_specialize=["tokens", "rank"])
def wgrad_kernel(
    dy,
    x,
    w_table,
    scale,
    tokens,
    rows,
    rows_per_owner,
    columns,
    rank,
    world,
    factor,
    largest,
    BULK: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    owner = turn(tl.program_id(1), rank, world)
    first_row = owner.to(tl.int64) * rows_per_owner
    owned = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner).to(tl.int32)
    tile_n, tile_k = tl.swizzle2d(
        tl.program_id(0) // tl.cdiv(columns, BLOCK_K),
        tl.program_id(0) % tl.cdiv(columns, BLOCK_K),
        tl.cdiv(rows_per_owner, BLOCK_N),
        tl.cdiv(columns, BLOCK_K),
        GROUP,
    )
    if tile_n * BLOCK_N < owned:
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        t = tl.arange(0, BLOCK_T)
        n_in, k_in = n < owned, k < columns
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        # See [Note: serial products].
        tl.assume(tokens > 0)
        for start in range(0, tokens, BLOCK_T):
            row = (start + t).to(tl.int64)
            dy_TN = load_block(dy, rows, row, row < tokens, first_row + n, n_in)
            x_TK = load_block(x, columns, row, row < tokens, k, k_in)
            acc = dot(tl.trans(dy_TN), x_TK, acc, UPCAST)
        target = sum_address(w_table, owner, largest)
        tile = summand(acc * scale, factor, largest)
        if BULK:
            descriptor = tl.make_tensor_descriptor(
                target, shape=[owned, columns], strides=[columns, 1], block_shape=[BLOCK_N, BLOCK_K]
            )
            descriptor.atomic_add([tile_n * BLOCK_N, tile_k * BLOCK_K], tile)
        else:
            offsets = n.to(tl.int64)[:, None] * columns + k[None, :]
            add_to_peer(target + offsets, tile, n_in[:, None] & k_in[None, :])


@makes_descriptors
def wgrad(
    *,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: PeerShards,
    bias: PeerShards | None = None,
    scale: float = 1.0,
    tile: WgradTile | None = None,
) -> None:
    """Adds scale * dyᵀ x into the shards of `weight` [N, K], and scale * sum(dy) into those of `bias` [N].

    Two ranks own two rows and one of a weight [3, 2]. Rank 0, with dy = [[1, 0, 2]] and x = [[3, 4]], adds [[3, 4], [0,
    0]] to its own shard and [[6, 8]] to rank 1's; rank 1, with dy = [[0, 1, 1]] and x = [[1, 1]], adds [[0, 0], [1, 1]]
    and [[1, 1]]. In the end the shards have grown by [[3, 4], [1, 1]] and [[7, 9]].

    dy: [T, N], x: [T, K], of one dtype (fp32, bf16, fp16), contiguous; T may be 0.
    tile: sizes of the kernel's tiles, by default chosen from shapes and dtypes. Exact sums may take half of its
        columns.

    Raises ValueError for anything else, before a launch.
    """
    _check(dy, x, weight, bias)
    tokens, columns = x.shape
    if tokens == 0 or weight.shape[0] == 0:
        return
    tile, bulk = adding_tile(tile or default_tile("wgrad", dy), weight)
    tiles = triton.cdiv(weight.rows_per_owner, tile.n) * triton.cdiv(columns, tile.k)
    wgrad_kernel[(tiles, weight.world)](
        dy,
        x,
        weight.table,
        scale,
        tokens,
        *weight.layout,
        *weight.adding,
        BULK=bulk,
        GROUP=tile.group,
        **tile_options(tile),
    )
    if bias is not None:
        scatter(gradient=dy.sum(0, dtype=torch.float32), peers=bias, scale=scale)


def adding_tile(tile: WgradTile, weight: PeerShards) -> tuple[WgradTile, bool]:
    """The tile for these sums, and whether it is added by one bulk reduction."""
    arch = architecture(weight.device)
    bulk = arch >= 90 and weight.shape[-1] * weight.dtype.itemsize % 16 == 0 and adds_in_bulk(weight)
    return tile if weight.exact is None else of_integers(tile, arch=arch, bulk=bulk), bulk


def _check(dy: torch.Tensor, x: torch.Tensor, weight: PeerShards, bias: PeerShards | None) -> None:
    if len(weight.shape) != 2 or dy.ndim != 2:
        raise ValueError(f"dy is {tuple(dy.shape)} and the weight {weight.shape}; give [T, N] and [N, K]")
    rows, columns = weight.shape
    check_tensor("dy", dy, shape=(len(dy), rows), dtype=COMPUTE_DTYPES, device=weight.device)
    check_tensor("x", x, shape=(len(dy), columns), dtype=dy.dtype, device=weight.device)
    check_sums(weight)
    if columns == 0:
        raise ValueError(f"the weight is {weight.shape}: a layer without input features has no gradient")
    if bias is not None:
        check_bias(bias, weight)
