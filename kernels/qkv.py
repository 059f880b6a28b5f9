"""q, k and v of an attention layer whose three weights are on the peers: bias, head norm and RoPE in the epilogue.

    p[t, r]    = sum_k x[t, k] W[r, k] + b[r]                    of Wq, Wk, Wv each; row r is owner r // n's row r % n
    u[t, h, :] = w * p / sqrt(mean_d p[t, h, d]^2 + eps)          with a norm, of q and k; else u = p
    q[t, h, j]        = c[t, j] u[t, h, j]        - s[t, j] u[t, h, j + D/2]
    q[t, h, j + D/2]  = s[t, j] u[t, h, j]        + c[t, j] u[t, h, j + D/2]        k likewise, v = p

T tokens, K input features, H heads of D elements (Hq of q, Hkv of k and v), n = ceil(H D / R) rows per owner; R
owners. c and s are the rows of the tables cos and sin at the token's position, in transformers' `rotate_half`
convention. Everything is fp32 until each result is rounded once. One program makes one head of one block of tokens, so
norm and RoPE see it whole; a head's rows may belong to several owners, so each row's address is looked up.

The weights are read in the K loop (strategy `direct`): over a link for few tokens; gathered (one owner) for any number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, architecture, dot, interpreting, peer_address
from .peers import PeerShards, check_bias, join
from .tiles import QkvTile, tile_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def pick(part, of_q, of_k, of_v):
    """The scalar that belongs to part 0 (q), 1 (k) or 2 (v)."""
    return tl.where(part == 0, of_q, tl.where(part == 1, of_k, of_v))


@triton.jit
def rope_rows(cos, sin, positions, t, t_in, table_rows, HEAD_DIM: tl.constexpr):
    """The tables' first halves at the positions of tokens `t`, fp32 [BLOCK_T, HEAD_DIM / 2].

    NaN at a position outside the tables: reading it would fault, and the host can't check it without waiting.
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
    """Where the biases of rows `row` are. Tells the compiler that each RUN of rows has one owner, so it joins loads."""
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
    columns = columns // VECTOR * VECTOR  # the same number: it tells the compiler how rows are aligned
    w_rows = peer_address(pick(part, wq_table, wk_table, wv_table), owner, DTYPE) + local.to(tl.int64) * columns

    t = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < tokens
    k_index = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_T, HEAD_DIM), dtype=tl.float32)
    for start in range(0, columns, BLOCK_K):
        k_in = start + k_index < columns
        x_TK = tl.load(
            x + t[:, None] * columns + (start + k_index)[None, :], mask=t_in[:, None] & k_in[None, :], other=0.0
        )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvWeights:
    """The weights of a layer: wq [Hq D, K], wk and wv [Hkv D, K]; biases [Hq D], [Hkv D], [Hkv D]: all three or none.

    Raises ValueError if shapes, dtypes, devices, worlds or ranks don't match.
    """

    wq: PeerShards
    wk: PeerShards
    wv: PeerShards
    bq: PeerShards | None = None
    bk: PeerShards | None = None
    bv: PeerShards | None = None

    def __post_init__(self) -> None:
        for name, weight in (("wq", self.wq), ("wk", self.wk), ("wv", self.wv)):
            if len(weight.shape) != 2 or 0 in weight.shape:
                raise ValueError(f"{name} is {weight.shape}; give two dimensions [heads x head_dim, K], none of them 0")
            want = (self.wq.shape[1], self.wq.dtype, self.wq.world, self.wq.rank, self.wq.device)
            have = (weight.shape[1], weight.dtype, weight.world, weight.rank, weight.device)
            for what, wanted, given in zip(("columns", "dtype", "world", "rank", "device"), want, have, strict=True):
                if wanted != given:
                    raise ValueError(f"{name} has {what} {given} and wq {wanted}; all three must agree")
        if self.wk.shape != self.wv.shape:
            raise ValueError(f"wk is {self.wk.shape} and wv {self.wv.shape}; k and v need as many heads")
        given = [bias is not None for bias in (self.bq, self.bk, self.bv)]
        if any(given) and not all(given):
            raise ValueError(f"only some of bq, bk, bv are given ({given}); give all three (zeros will do) or none")
        if self.bq is not None:
            for bias, weight in ((self.bq, self.wq), (self.bk, self.wk), (self.bv, self.wv)):
                check_bias(bias, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """RMSNorm over each head of q and of k, between bias and RoPE (Qwen3): weights [D], local tensors."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float

    def __post_init__(self) -> None:
        for name, weight in (("q_weight", self.q_weight), ("k_weight", self.k_weight)):
            if weight.ndim != 1 or not weight.is_contiguous() or weight.dtype not in _DTYPES:
                raise ValueError(
                    f"{name} is {tuple(weight.shape)} of {weight.dtype}, strides {weight.stride()}; give a contiguous "
                    f"[head_dim] of float32, bfloat16 or float16"
                )
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps}; a head of zeros needs it above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Tables cos, sin [P, D] as transformers' rotary embeddings make them, and the tokens' rows in them.

    Only the first of the tables' equal halves is read. `positions`: int64 [T], from 0 in each packed sequence; one
    outside 0..P-1 makes its token's q and k NaN (a check on the host would wait for the device). A model's
    `position_embeddings` are already the tables' rows: then `positions` counts from 0 to T-1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        cos, sin, positions = self.cos, self.sin, self.positions
        if cos.ndim != 2 or cos.shape != sin.shape:
            raise ValueError(f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; give both as [P, head_dim]")
        if cos.dtype != sin.dtype or cos.dtype not in _DTYPES:
            raise ValueError(f"cos is {cos.dtype} and sin {sin.dtype}; give both in float32, bfloat16 or float16")
        if positions.dtype != torch.int64 or positions.ndim != 1:
            raise ValueError(f"positions are {tuple(positions.shape)} of {positions.dtype}; give [T] of int64")
        for name, value in (("cos", cos), ("sin", sin), ("positions", positions)):
            if not value.is_contiguous():
                raise ValueError(f"{name} has strides {value.stride()}; it must be contiguous")


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

    With a norm, give `q_pre` and `k_pre`, shaped as q and k, if a backward follows: the projections before the norm are
    written there for `qkv_grad` (see [Note: saved] in qkv_grad.py). D is a power of two from 16 to 256. Raises
    ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    check_qkv(x, weights, rope, norm, {"q": q, "k": k, "v": v}, {"q_pre": q_pre, "k_pre": k_pre})
    tokens, q_heads, head_dim = q.shape
    if tokens == 0:
        return
    operator = "qkv" if head_dim <= 128 else "qkv_wide"
    tile = tile or tile_of(operator, element_bytes=x.element_size(), arch=architecture(x.device), tokens=tokens)
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
    """How many elements one load of a row takes: 16 bytes' worth, if rows of that many columns are aligned to it."""
    elements = 16 // dtype.itemsize
    return elements if columns % elements == 0 else 1


def check_qkv(
    x: torch.Tensor,
    weights: QkvWeights,
    rope: Rope,
    norm: QkNorm | None,
    heads: dict[str, torch.Tensor],
    saved: dict[str, torch.Tensor | None],
) -> None:
    """Raises ValueError unless x, three head tensors (q, k, v or their gradients) and what is saved match."""
    columns = weights.wq.shape[1]
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x is {tuple(x.shape)}; with weights of {columns} columns give [T, {columns}]")
    if x.dtype != weights.wq.dtype or x.dtype not in _DTYPES:
        raise ValueError(
            f"x is {x.dtype} and the weights {weights.wq.dtype}; give both in one of float32, bfloat16 or float16"
        )
    (first_name, first), *_ = heads.items()
    if first.ndim != 3:
        raise ValueError(f"{first_name} is {tuple(first.shape)}; give [T, heads, head_dim]")
    head_dim = first.shape[2]
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"head_dim is {head_dim}; this kernel takes 16, 32, 64, 128 or 256: leave this layer as it is (fully_shard "
            f"gathers its weights whole) instead of replacing it"
        )
    for (name, value), weight in zip(heads.items(), (weights.wq, weights.wk, weights.wv), strict=True):
        want = (x.shape[0], weight.shape[0] // head_dim, head_dim)
        if weight.shape[0] % head_dim:
            raise ValueError(f"a weight has {weight.shape[0]} rows, which are not whole heads of {head_dim}")
        if tuple(value.shape) != want:
            raise ValueError(f"{name} is {tuple(value.shape)}; give {want}")
    if (norm is None and any(value is not None for value in saved.values())) or (
        len({value is None for value in saved.values()}) > 1
    ):
        raise ValueError(f"{' and '.join(saved)} go together, and with a norm only; give both or none")
    for (name, value), like in zip(saved.items(), heads.values(), strict=False):
        if value is not None and value.shape != like.shape:
            raise ValueError(f"{name} is {tuple(value.shape)}; give {tuple(like.shape)}")
    given = {"x": x, **heads, **{name: value for name, value in saved.items() if value is not None}}
    for name, value in given.items():
        if value.dtype != x.dtype:
            raise ValueError(f"{name} is {value.dtype}; x and the weights are {x.dtype}")
        if not value.is_contiguous():
            raise ValueError(f"{name} has strides {value.stride()}; it must be contiguous")
    if rope.cos.shape[1] < head_dim:
        raise ValueError(
            f"cos has {rope.cos.shape[1]} columns and head_dim is {head_dim}: a partial rotary embedding, which this "
            f"kernel doesn't have; leave this layer as it is instead of replacing it"
        )
    if rope.cos.shape[1] != head_dim:
        raise ValueError(f"cos is {tuple(rope.cos.shape)}; give [P, {head_dim}]")
    if rope.positions.shape != x.shape[:1]:
        raise ValueError(f"positions are {tuple(rope.positions.shape)}; give [{x.shape[0]}], one per token of x")
    given |= {"cos": rope.cos, "sin": rope.sin, "positions": rope.positions}
    if norm is not None:
        for name, value in (("q_weight", norm.q_weight), ("k_weight", norm.k_weight)):
            if value.shape != (head_dim,):
                raise ValueError(f"{name} is {tuple(value.shape)}; give [{head_dim}], one per element of a head")
            given[name] = value
    for name, value in given.items():
        if value.device != weights.wq.device:
            raise ValueError(f"{name} is on {value.device} and the weights' tables on {weights.wq.device}")


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
