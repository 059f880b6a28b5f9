"""The backward of qkv: from dq, dk, dv to dx, to the norms' weights, and into the owners of the three weights.

    u      = Rᵀ dq                       R: the token's rotation (and scaling, where the tables scale)
    dp     = u                           without a norm; with one, z = p / rms(p) and w its weight:
    dp     = (w u - z mean_d(w u z)) / rms(p)            dw = sum_t,h u z            dk likewise; dp of v = dv
    dx     = dpq Wq + dpk Wk + dpv Wv    one sum in fp32, rounded once
    dW_o  += scale * dpᵀ x,   db_o += scale * sum_t dp   of each of the three, straight into their owners (wgrad.py)

T tokens, K input features, H heads of D elements, p the projections before norm and RoPE, o an owner: see qkv.py.

[Note: saved] Without a norm the backward needs only x and the positions: RoPE is linear. With one it needs p. The
forward stores p in the compute dtype (as much again as q and k; autograd's own graph of these steps keeps several such
tensors), and 1/rms is recomputed from it here, where a program holds the whole head anyway. Recovering p from q would
divide by w, which may be 0, and by the tables' scale. Recomputing it from x would cost the product again, and the
weights a second time over the link.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, default_tile, dot, load_block, peer_address, store_block, tile_options
from .peers import PeerShards, check_apart, check_tensor, join, require_shards
from .qkv import pick, rope_rows, row_vector, store_halves
from .qkv_inputs import QkNorm, QkvWeights, Rope, check_qkv
from .scatter import scatter
from .tiles import LinearTile, WgradTile
from .wgrad import wgrad

UNDO_WARPS = 8  # 4 spill on sm_80


@triton.jit(do_not_specialize=["tokens", "table_rows"])
def qk_undo_kernel(
    dq,
    dk,
    q_pre,
    k_pre,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    positions,
    dq_pre,
    dk_pre,
    dq_norm_parts,
    dk_norm_parts,
    tokens,
    q_heads,
    kv_heads,
    table_rows,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    part = tl.where(tl.program_id(1) < q_heads, 0, 1)
    heads = pick(part, q_heads, kv_heads, kv_heads)
    head = tl.program_id(1) - pick(part, 0, q_heads, q_heads)
    tile_t = tl.program_id(0).to(tl.int64)
    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < tokens
    j = tl.arange(0, HEAD_DIM // 2)
    offsets = (t[:, None] * heads + head) * HEAD_DIM + j[None, :]
    c, s = rope_rows(cos, sin, positions, t, t_in, table_rows, HEAD_DIM)
    gradient = pick(part, dq, dk, dk) + offsets
    first = tl.load(gradient, mask=t_in[:, None], other=0.0).to(tl.float32)
    second = tl.load(gradient + HEAD_DIM // 2, mask=t_in[:, None], other=0.0).to(tl.float32)
    first, second = first * c + second * s, second * c - first * s
    if HAS_NORM:
        saved = pick(part, q_pre, k_pre, k_pre) + offsets
        z_first = tl.load(saved, mask=t_in[:, None], other=0.0).to(tl.float32)
        z_second = tl.load(saved + HEAD_DIM // 2, mask=t_in[:, None], other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(z_first * z_first + z_second * z_second, axis=1) / HEAD_DIM + eps)[:, None]
        z_first *= inverse
        z_second *= inverse
        # Tokens past the last have no position, so their rotation is NaN: they stay out of the sums.
        parts = pick(part, dq_norm_parts, dk_norm_parts, dk_norm_parts) + (tile_t * heads + head) * HEAD_DIM + j
        tl.store(parts, tl.sum(tl.where(t_in[:, None], first * z_first, 0.0), axis=0))
        tl.store(parts + HEAD_DIM // 2, tl.sum(tl.where(t_in[:, None], second * z_second, 0.0), axis=0))
        weight = pick(part, q_norm, k_norm, k_norm) + j
        first *= tl.load(weight).to(tl.float32)[None, :]
        second *= tl.load(weight + HEAD_DIM // 2).to(tl.float32)[None, :]
        mean = (tl.sum(first * z_first + second * z_second, axis=1) / HEAD_DIM)[:, None]
        first = (first - z_first * mean) * inverse
        second = (second - z_second * mean) * inverse
    store_halves(pick(part, dq_pre, dk_pre, dk_pre), first, second, t, t_in, heads, head, HEAD_DIM)


@triton.jit(do_not_specialize=["tokens", "rank"])
def qkv_dx_kernel(
    dq_pre,
    dk_pre,
    dv,
    wq_table,
    wk_table,
    wv_table,
    dx,
    tokens,
    columns,
    q_rows,
    kv_rows,
    q_rows_per_owner,
    kv_rows_per_owner,
    rank,
    world,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    columns = columns // VECTOR * VECTOR  # the same number: a hint of the rows' alignment
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
    for index in range(3 * world):
        part = index // world
        owner = (rank + index) % world
        rows = pick(part, q_rows, kv_rows, kv_rows)
        rows_per_owner = pick(part, q_rows_per_owner, kv_rows_per_owner, kv_rows_per_owner)
        first_row = tl.cast(owner, tl.int64) * rows_per_owner
        owned = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner)
        weight = peer_address(pick(part, wq_table, wk_table, wv_table), owner, DTYPE)
        gradient = pick(part, dq_pre, dk_pre, dv)
        for start in range(0, owned, BLOCK_N):
            row = start + n
            dp_TN = load_block(gradient, rows, t, t < tokens, first_row + row, row < owned)
            w_NK = load_block(weight, columns, row, row < owned, k, k < columns)
            acc = dot(dp_TN, w_NK, acc, UPCAST)
    store_block(dx, columns, t, t < tokens, k, k < columns, acc)


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvGradients:
    """Targets of gradients, None if not needed. Adds to the PeerShards; overwrites the plain tensors.

    wq, wk, wv, bq, bk, bv: the owners' gradient shards, shaped as the weights, maybe over another number of owners.
    dx: [T, K] of x's dtype.
    q_norm, k_norm: fp32 [D], both or none.
    """

    dx: torch.Tensor | None = None
    wq: PeerShards | None = None
    wk: PeerShards | None = None
    wv: PeerShards | None = None
    bq: PeerShards | None = None
    bk: PeerShards | None = None
    bv: PeerShards | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("only one of q_norm and k_norm is given; one kernel makes both: give both or none")


def qkv_grad(
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    x: torch.Tensor,
    weights: QkvWeights,
    rope: Rope,
    norm: QkNorm | None = None,
    q_pre: torch.Tensor | None = None,
    k_pre: torch.Tensor | None = None,
    out: QkvGradients,
    scale: float = 1.0,
    block: int = 32,
    dx_tile: LinearTile | None = None,
    wgrad_tile: WgradTile | None = None,
) -> None:
    """Writes and adds the gradients of `out`; `scale` multiplies only additions to shards.

    In the example of `qkv`, dq = 1 everywhere and dk = dv = 0 add 2 to each row of wq's shards, on both ranks, and dx =
    [[16 * 1 + 16 * 3]] = [[64]].

    The additions are complete when this rank's stream is drained.

    dq: [T, Hq, D], of the weights' dtype; T may be 0.
    dk, dv: [T, Hkv, D].
    x: [T, K].
    weights, rope, norm, q_pre, k_pre: as in the forward.
    block: tokens of a program that undoes norm and rotation.
    dx_tile, wgrad_tile: sizes of the other kernels' tiles, by default chosen from shapes and dtypes.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    check_qkv(x, weights, rope, norm, {"dq": dq, "dk": dk, "dv": dv}, {"q_pre": q_pre, "k_pre": k_pre})
    _check_out(out, x, weights, norm, q_pre, dq.shape[2], dq, dk, dv, q_pre, k_pre)
    tokens, q_heads, head_dim = dq.shape
    kv_heads = dk.shape[1]
    if tokens == 0:
        for gradient in (out.q_norm, out.k_norm):
            if gradient is not None:
                gradient.zero_()
        return
    dq_pre, dk_pre = torch.empty_like(dq), torch.empty_like(dk)
    blocks = triton.cdiv(tokens, block)
    parts = [dq.new_empty((blocks * heads, head_dim), dtype=torch.float32) for heads in (q_heads, kv_heads) if norm]
    qk_undo_kernel[(blocks, q_heads + kv_heads)](
        dq,
        dk,
        *((dq, dk, x, x, 0.0) if norm is None else (q_pre, k_pre, norm.q_weight, norm.k_weight, norm.eps)),
        rope.cos,
        rope.sin,
        rope.positions,
        dq_pre,
        dk_pre,
        *(parts or (dq_pre, dk_pre)),
        tokens,
        q_heads,
        kv_heads,
        rope.cos.shape[0],
        HAS_NORM=norm is not None,
        HEAD_DIM=head_dim,
        BLOCK_T=block,
        num_warps=UNDO_WARPS,
    )
    if out.q_norm is not None:
        torch.sum(parts[0], dim=0, out=out.q_norm)
        torch.sum(parts[1], dim=0, out=out.k_norm)
    pre = [gradient.view(tokens, -1) for gradient in (dq_pre, dk_pre, dv)]
    if out.dx is not None:
        _dx(pre, weights, out.dx, dx_tile or default_tile("qkv_dx", x))
    for gradient, weight, bias in zip(pre, (out.wq, out.wk, out.wv), (out.bq, out.bk, out.bv), strict=True):
        if weight is not None:
            wgrad(dy=gradient, x=x, weight=weight, bias=bias, scale=scale, tile=wgrad_tile)
        elif bias is not None:
            scatter(gradient=gradient.sum(0, dtype=torch.float32), peers=bias, scale=scale)


def _dx(pre: list[torch.Tensor], weights: QkvWeights, dx: torch.Tensor, tile: LinearTile) -> None:
    tokens, columns = dx.shape
    qkv_dx_kernel[(triton.cdiv(tokens, tile.t), triton.cdiv(columns, tile.k))](
        *pre,
        *(weight.table for weight in (weights.wq, weights.wk, weights.wv)),
        dx,
        tokens,
        columns,
        weights.wq.shape[0],
        weights.wk.shape[0],
        weights.wq.rows_per_owner,
        weights.wk.rows_per_owner,
        weights.wq.rank,
        weights.wq.world,
        DTYPE=TL_DTYPES[dx.dtype],
        VECTOR=row_vector(columns, dx.dtype),
        **tile_options(tile),
    )


def _check_out(
    out: QkvGradients,
    x: torch.Tensor,
    weights: QkvWeights,
    norm: QkNorm | None,
    q_pre: torch.Tensor | None,
    head_dim: int,
    *read: torch.Tensor | None,
) -> None:
    if norm is not None and q_pre is None:
        raise ValueError("q_pre and k_pre are None; with a norm give those of the forward")
    if norm is None and out.q_norm is not None:
        raise ValueError("out.q_norm is given without a norm; leave it None")
    if out.dx is not None:
        check_tensor("dx", out.dx, shape=tuple(x.shape), dtype=x.dtype, device=x.device)
        check_apart("dx", out.dx, x, *read)
    for name, value in (("q_norm", out.q_norm), ("k_norm", out.k_norm)):
        if value is not None:
            check_tensor(name, value, shape=(head_dim,), dtype=torch.float32, device=x.device)
    for name in ("wq", "wk", "wv", "bq", "bk", "bv"):
        if (shards := getattr(out, name)) is not None:
            require_shards(f"out.{name}", shards)
            weight = getattr(weights, f"w{name[1]}")
            shape = weight.shape if name[0] == "w" else weight.shape[:1]
            want = (shape, shards.sum_dtype, weight.device)
            if (has := (shards.shape, shards.dtype, shards.device)) != want:
                raise ValueError(f"out.{name} has shape, dtype and device {has}; give {want}")


def qkv_grad_ref(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    weights: list[list[torch.Tensor]],
    biases: list[list[torch.Tensor]] | None,
    rope: Rope,
    norm: QkNorm | None,
) -> dict[str, torch.Tensor]:
    """Gradients by name (dx, wq .. bv, q_norm, k_norm) of the whole tensors, in float64, by the equations above.

    `gradients`: dq, dk, dv; `weights`: the shards of wq, wk, wv; `biases`: of bq, bk, bv.
    """
    head_dim = gradients[0].shape[2]
    half = head_dim // 2
    cos, sin = (table[rope.positions, None, :half].double() for table in (rope.cos, rope.sin))
    found = {"dx": torch.zeros_like(x, dtype=torch.float64)}
    for part, letter in enumerate("qkv"):
        g = gradients[part].double()
        if part < 2:
            first, second = g[..., :half], g[..., half:]
            g = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
            if norm is not None:
                p = x.double() @ join(weights[part]).double().T
                if biases is not None:
                    p = p + join(biases[part]).double()
                p = p.unflatten(1, (-1, head_dim))
                inverse = torch.rsqrt(p.square().mean(-1, keepdim=True) + norm.eps)
                z = p * inverse
                found[f"{letter}_norm"] = (g * z).sum((0, 1))
                g = g * (norm.q_weight, norm.k_weight)[part].double()
                g = (g - z * (g * z).mean(-1, keepdim=True)) * inverse
        g = g.flatten(1)
        found["dx"] += g @ join(weights[part]).double()
        found[f"w{letter}"] = g.T @ x.double()
        if biases is not None:
            found[f"b{letter}"] = g.sum(0)
    return found
