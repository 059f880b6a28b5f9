"""The gradients of experts' weights (experts.py): each is added straight into its owner's shard.

    dW_e[n, k] += scale * sum_s dy[s, n] x[s, k],     db_e[n] += scale * sum_s dy[s, n]         only if e has rows

Letters as in experts.py. As in wgrad.py, a program makes one tile of one expert; the next rank's experts come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import (
    add_to_peer,
    default_tile,
    dot,
    load_block,
    makes_descriptors,
    sum_address,
    summand,
    tile_options,
)
from .experts import check_experts, rows_of_expert, rows_of_experts
from .peers import COMPUTE_DTYPES, PeerShards, check_bias, check_sums, check_tensor
from .tiles import WgradTile
from .wgrad import adding_tile

BIAS_BLOCK_S, BIAS_BLOCK_N = 32, 128  # of a program that sums a bias's gradient


@triton.jit(do_not_specialize=["first"])
def grouped_wgrad_kernel(
    dy,
    x,
    offsets,
    w_table,
    scale,
    experts,
    experts_per_owner,
    rows,
    columns,
    first,
    factor,
    largest,
    BULK: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    expert = (first + tl.program_id(1)) % experts
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    if begin < end:
        columns_of_tiles = tl.cdiv(columns, BLOCK_K)
        tile_n, tile_k = tl.swizzle2d(
            tl.program_id(0) // columns_of_tiles,
            tl.program_id(0) % columns_of_tiles,
            tl.cdiv(rows, BLOCK_N),
            columns_of_tiles,
            GROUP,
        )
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        n_in, k_in = n < rows, k < columns
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        tl.assume(begin < end)  # see [Note: serial products] in wgrad.py
        for start in range(begin, end, BLOCK_T):
            s = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
            s_in = s < end
            dy_SN = load_block(dy, rows, s, s_in, n, n_in)
            x_SK = load_block(x, columns, s, s_in, k, k_in)
            acc = dot(tl.trans(dy_SN), x_SK, acc, UPCAST)
        local = (expert % experts_per_owner).to(tl.int64)
        target = sum_address(w_table, expert // experts_per_owner, largest) + local * rows * columns
        tile = summand(acc * scale, factor, largest)
        if BULK:
            descriptor = tl.make_tensor_descriptor(
                target, shape=[rows, columns], strides=[columns, 1], block_shape=[BLOCK_N, BLOCK_K]
            )
            descriptor.atomic_add([tile_n * BLOCK_N, tile_k * BLOCK_K], tile)
        else:
            add_to_peer(target + n.to(tl.int64)[:, None] * columns + k[None, :], tile, n_in[:, None] & k_in[None, :])


@triton.jit(do_not_specialize=["first"])
def grouped_bias_grad_kernel(
    dy,
    offsets,
    b_table,
    scale,
    experts,
    experts_per_owner,
    columns,
    first,
    factor,
    largest,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    expert = (first + tl.program_id(1)) % experts
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    if begin < end:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in = n < columns
        acc = tl.zeros((BLOCK_S, BLOCK_N), dtype=tl.float32)
        for start in range(begin, end, BLOCK_S):
            s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
            acc += load_block(dy, columns, s, s < end, n, n_in).to(tl.float32)
        local = (expert % experts_per_owner).to(tl.int64)
        target = sum_address(b_table, expert // experts_per_owner, largest) + local * columns
        add_to_peer(target + n, summand(tl.sum(acc, axis=0) * scale, factor, largest), n_in)


@makes_descriptors
def grouped_wgrad(
    *,
    dy: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    weight: PeerShards,
    bias: PeerShards | None = None,
    transposed: bool = False,
    scale: float = 1.0,
    tile: WgradTile | None = None,
) -> None:
    """Adds scale * dy_eᵀ x_e into the shards of `weight` [E, N, K], or x_eᵀ dy_e if `transposed` [E, K, N], and scale *
    the sum of dy_e into those of `bias` [E, N].

    Two ranks own an expert each, with N = 1 and K = 2. Rank 0, with dy = [[1], [2]], x = [[3, 4], [5, 6]] and offsets =
    [0, 2, 2], adds [[13, 16]] to expert 0, its own, and nothing to rank 1's. Rank 1, with dy = [[1], [1]], the same x
    and offsets = [0, 1, 2], adds [[3, 4]] to rank 0's expert and [[5, 6]] to its own.

    Shards of experts without rows are not touched; each element of the others is added to once.

    dy: [S, N], x: [S, K], of one dtype.
    offsets: as in `grouped_linear`.
    tile: as in `wgrad`, for the rows and columns of W_e as it is stored.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    outputs, inputs = check_experts(weight, offsets, transposed, sums=True)
    check_tensor("dy", dy, shape=(*dy.shape[:1], outputs), dtype=COMPUTE_DTYPES, device=weight.device)
    check_tensor("x", x, shape=(len(dy), inputs), dtype=dy.dtype, device=weight.device)
    if bias is not None:
        check_bias(bias, weight, shape=(weight.shape[0], outputs))
        check_sums(bias)
    experts, (down, across) = weight.shape[0], weight.shape[1:]
    if len(x) == 0 or experts == 0:
        return
    tile = tile or default_tile("wgrad", x, tokens=rows_of_expert(x, weight))
    tile, bulk = adding_tile(tile, weight)
    first = (weight.rank + 1) * weight.rows_per_owner % experts
    grouped_wgrad_kernel[(triton.cdiv(down, tile.n) * triton.cdiv(across, tile.k), experts)](
        *((x, dy) if transposed else (dy, x)),
        *(offsets, weight.table, scale, experts, weight.rows_per_owner, down, across, first),
        *weight.adding,
        BULK=bulk,
        GROUP=tile.group,
        **tile_options(tile),
    )
    if bias is not None:
        grouped_bias_grad_kernel[(triton.cdiv(outputs, BIAS_BLOCK_N), experts)](
            *(dy, offsets, bias.table, scale, experts, bias.rows_per_owner, outputs, first),
            *bias.adding,
            BLOCK_S=BIAS_BLOCK_S,
            BLOCK_N=BIAS_BLOCK_N,
        )


def grouped_wgrad_ref(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, *, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added at scale 1 to the whole weight and the whole bias [E, N], in plain torch, in float64."""
    dy, x, parts = dy.double(), x.double(), rows_of_experts(offsets)
    dw = torch.stack([dy[rows].T @ x[rows] for rows in parts])
    return dw.mT if transposed else dw, torch.stack([dy[rows].sum(0) for rows in parts])
