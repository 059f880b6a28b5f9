"""q, k and v of an attention layer whose three weights are on the peers: bias, head norm and RoPE in the epilogue.

    p[t, r]    = sum_k x[t, k] W[r, k] + b[r]                    of Wq, Wk, Wv each; row r is owner r // n's row r % n
    u[t, h, :] = w * p / sqrt(mean_d p[t, h, d]^2 + eps)          with a norm, of q and k; else u = p
    q[t, h, j]        = c[t, j] u[t, h, j]        - s[t, j] u[t, h, j + D/2]
    q[t, h, j + D/2]  = s[t, j] u[t, h, j]        + c[t, j] u[t, h, j + D/2]        k likewise, v = p

T tokens, K input features, H heads of D elements (Hq of q, Hkv of k and v), n = ceil(H D / R) rows per owner; R
owners. c and s are the rows of the tables cos and sin at the token's position, in transformers' `rotate_half`
convention. Everything is fp32 until each result is rounded once. One program makes one head of one block of tokens, so
norm and RoPE see it whole; a head's rows may belong to several owners, so each row's address is looked up.

The weights are read in the K loop (`direct`): over a link for few tokens; gathered (one owner) for any number.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, default_tile, dot, interpreting, load_block, peer_address
from .peers import check_apart, join
from .qkv_inputs import QkNorm, QkvWeights, Rope, check_qkv
from .tiles import QkvTile


@triton.jit
def pick(part, of_q, of_k, of_v):
    """The scalar of part 0 (q), 1 (k) or 2 (v)."""
    return tl.where(part == 0, of_q, tl.where(part == 1, of_k, of_v))


@triton.jit
def rope_rows(cos, sin, positions, t, t_in, table_rows, HEAD_DIM: tl.constexpr):
    """The tables' first halves at the positions of tokens `t`, fp32 [BLOCK_T, HEAD_DIM / 2].

    NaN at a position outside the tables: reading it would fault, and a check on the host would synchronise.
    """
    j = tl.arange(0, HEAD_DIM // 2)
    position = tl.load(positions + t, mask=t_in, other=0)
    known = (t_in & (position >= 0) & (position < table_rows))[:, None]
    offsets = position[:, None] * HEAD_DIM + j[None, :]
    c = tl.load(cos + offsets, mask=known, other=0.0).to(tl.float32)
    s = tl.load(sin + offsets, mask=known, other=0.0).to(tl.float32)
    return c, tl.where(known, s, float("nan"))  # one is enough: both halves of a rotated head use both


@triton.jit
def store_halves(out, first, second, t, t_in, heads, head, HEAD_DIM: tl.constexpr):
    """Writes a head's two halves into out [T, heads, HEAD_DIM]."""
    offsets = (t[:, None] * heads + head) * HEAD_DIM + tl.arange(0, HEAD_DIM // 2)[None, :]
    tl.store(out + offsets, first.to(out.dtype.element_ty), mask=t_in[:, None])
    tl.store(out + offsets + HEAD_DIM // 2, second.to(out.dtype.element_ty), mask=t_in[:, None])


@triton.jit
def bias_pointers(table, row, rows_per_owner, DTYPE: tl.constexpr, RUN: tl.constexpr):
    """Pointers to the biases of rows `row`. Lets the compiler join loads: each RUN of rows has one owner."""
    bias = peer_address(table, row // rows_per_owner, DTYPE) + row % rows_per_owner
    return tl.max_contiguous(tl.multiple_of(bias, RUN * DTYPE.primitive_bitwidth // 8), RUN)


@triton.jit
def load_row(pointers, t_in):
    """One row of values for all tokens: fp32 [BLOCK_T, number of pointers].

    Read once per token, from the L1 cache: a vector of fewer elements than threads is read in 2-byte words.
    """
    return tl.load(pointers[None, :] + tl.zeros_like(t_in).to(tl.int32)[:, None], mask=t_in[:, None], other=0.0).to(
        tl.float32
    )


@triton.jit(do_not_specialize=["tokens", "table_rows", "rank"])
def qkv_kernel(
    x,
    wq_table,
    wk_table,
    wv_table,
    bq_table,
    bk_table,
    bv_table,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    positions,
    q,
    k,
    v,
    q_pre,
    k_pre,
    tokens,
    columns,
    q_rows_per_owner,
    kv_rows_per_owner,
    q_heads,
    kv_heads,
    table_rows,
    rank,
    world,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SAVE: tl.constexpr,
    VECTOR: tl.constexpr,
    RUN: tl.constexpr,
    UPCAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    all_heads = q_heads + 2 * kv_heads
    tile_t, index = tl.swizzle2d(
        tl.program_id(0) // all_heads, tl.program_id(0) % all_heads, tl.cdiv(tokens, BLOCK_T), all_heads, GROUP
    )
    part = tl.where(index < q_heads, 0, tl.where(index < q_heads + kv_heads, 1, 2))
    heads = pick(part, q_heads, kv_heads, kv_heads)
    rows_per_owner = pick(part, q_rows_per_owner, kv_rows_per_owner, kv_rows_per_owner)
    # Each rank begins at its own rows, so ranks read different owners at a time.
    head = (index - pick(part, 0, q_heads, q_heads + kv_heads) + rank * heads // world) % heads

    row = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    owner, local = row // rows_per_owner, row % rows_per_owner
    columns = columns // VECTOR * VECTOR  # the same number: a hint of the rows' alignment
    w_rows = peer_address(pick(part, wq_table, wk_table, wv_table), owner, DTYPE) + local.to(tl.int64) * columns

    t = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < tokens
    k_index = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_T, HEAD_DIM), dtype=tl.float32)
    for start in range(0, columns, BLOCK_K):
        k_in = start + k_index < columns
        x_TK = load_block(x, columns, t, t_in, start + k_index, k_in)
        w_DK = tl.load(w_rows[:, None] + (start + k_index)[None, :], mask=k_in[None, :], other=0.0)
        acc = dot(x_TK, tl.trans(w_DK), acc, UPCAST)
    first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, HEAD_DIM // 2)), (0, 2, 1)))
    if HAS_BIAS:
        table = pick(part, bq_table, bk_table, bv_table)
        row = head * HEAD_DIM + tl.arange(0, HEAD_DIM // 2)
        first += load_row(bias_pointers(table, row, rows_per_owner, DTYPE, RUN), t_in)
        second += load_row(bias_pointers(table, row + HEAD_DIM // 2, rows_per_owner, DTYPE, RUN), t_in)
    if part < 2:
        if SAVE:
            store_halves(pick(part, q_pre, k_pre, k_pre), first, second, t, t_in, heads, head, HEAD_DIM)
        if HAS_NORM:
            inverse = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
            weight = pick(part, q_norm, k_norm, k_norm) + tl.arange(0, HEAD_DIM // 2)
            first *= inverse * load_row(weight, t_in)
            second *= inverse * load_row(weight + HEAD_DIM // 2, t_in)
        c, s = rope_rows(cos, sin, positions, t, t_in, table_rows, HEAD_DIM)
        first, second = first * c - second * s, first * s + second * c
    store_halves(pick(part, q, k, v), first, second, t, t_in, heads, head, HEAD_DIM)


def qkv(
    *,
    x: torch.Tensor,
    weights: QkvWeights,
    rope: Rope,
    norm: QkNorm | None = None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_pre: torch.Tensor | None = None,
    k_pre: torch.Tensor | None = None,
    tile: QkvTile | None = None,
) -> None:
    """Writes q [T, Hq, D], k and v [T, Hkv, D] of x [T, K], all of the weights' dtype; T may be 0.

    Two ranks own a query head of D = 16 each, K = 1: all rows of wq are 1 on rank 0 and 3 on rank 1. x = [[2]] at
    position 0, where nothing is rotated, makes every element of q[0, 0] 2 and every element of q[0, 1] 6.

    D is a power of two from 16 to 256.

    rope: its tables, and the tokens' positions.
    norm: RMSNorm of each head of q and of k, before the rotation.
    q_pre, k_pre: with a norm, shaped as q and k: what `qkv_grad` needs, the projections before the norm, is written
        there.
    tile: sizes of the kernel's tiles, by default chosen from shapes and dtypes.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    check_qkv(x, weights, rope, norm, {"q": q, "k": k, "v": v}, {"q_pre": q_pre, "k_pre": k_pre})
    written = [("q", q), ("k", k), ("v", v), ("q_pre", q_pre), ("k_pre", k_pre)]
    for place, (name, value) in enumerate(written):
        check_apart(name, value, x, *(other for _, other in written[place + 1 :]))
    tokens, q_heads, head_dim = q.shape
    if tokens == 0:
        return
    tile = tile or default_tile("qkv" if head_dim <= 128 else "qkv_wide", x)
    kv_heads, columns = k.shape[1], x.shape[1]
    save = q_pre is not None
    qkv_kernel[(triton.cdiv(tokens, tile.t) * (q_heads + 2 * kv_heads),)](
        x,
        *(weight.table for weight in (weights.wq, weights.wk, weights.wv)),
        *(weights.wq.table if bias is None else bias.table for bias in (weights.bq, weights.bk, weights.bv)),
        *((x, x, 0.0) if norm is None else (norm.q_weight, norm.k_weight, norm.eps)),
        rope.cos,
        rope.sin,
        rope.positions,
        q,
        k,
        v,
        q_pre if save else q,
        k_pre if save else k,
        tokens,
        columns,
        weights.wq.rows_per_owner,
        weights.wk.rows_per_owner,
        q_heads,
        kv_heads,
        rope.cos.shape[0],
        weights.wq.rank,
        weights.wq.world,
        DTYPE=TL_DTYPES[x.dtype],
        HAS_BIAS=weights.bq is not None,
        HAS_NORM=norm is not None,
        SAVE=save,
        VECTOR=row_vector(columns, x.dtype),
        # This many rows, starting at a multiple of it, have one owner; at most as many as one load takes.
        RUN=math.gcd(weights.wq.rows_per_owner, weights.wk.rows_per_owner, 16 // x.dtype.itemsize),
        UPCAST=interpreting(),
        HEAD_DIM=head_dim,
        BLOCK_T=tile.t,
        BLOCK_K=tile.k,
        GROUP=tile.group,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def row_vector(columns: int, dtype: torch.dtype) -> int:
    """The number of elements in one load of a row: 16 bytes' worth, if rows of that many columns are aligned to it."""
    elements = 16 // dtype.itemsize
    return elements if columns % elements == 0 else 1


def qkv_ref(
    x: torch.Tensor,
    weights: list[list[torch.Tensor]],
    biases: list[list[torch.Tensor]] | None,
    rope: Rope,
    norm: QkNorm | None,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in plain torch, in float64; `weights`: the shards of wq, wk, wv; `biases`: of bq, bk, bv."""
    half = head_dim // 2
    cos, sin = (table[rope.positions, None, :half].double() for table in (rope.cos, rope.sin))
    out = []
    for part, shards in enumerate(weights):
        p = x.double() @ join(shards).double().T
        if biases is not None:
            p = p + join(biases[part]).double()
        p = p.unflatten(1, (-1, head_dim))
        if part < 2:
            if norm is not None:
                weight = (norm.q_weight, norm.k_weight)[part].double()
                p = weight * p * torch.rsqrt(p.square().mean(-1, keepdim=True) + norm.eps)
            first, second = p[..., :half], p[..., half:]
            p = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
        out.append(p)
    return out[0], out[1], out[2]
