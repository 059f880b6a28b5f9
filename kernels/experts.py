"""The linear layers of experts whose weights are on the peers: each row is multiplied by the weight of its expert.

    y[s, n]     = sum_k x[s, k] W_e[n, k] + b_e[n]                 rows s of expert e: offsets[e] <= s < offsets[e + 1]
    dx[s, k]    = sum_n dy[s, n] W_e[n, k]

S rows sorted by expert, E experts, N output features, K input features; W_e is [N, K], or [K, N] if `transposed`. Owner
o of R has the experts o m .. (o + 1) m - 1, m = ceil(E / R). A gate makes I = N / 2 features of y, see `Gate`.
Everything is fp32 until each result is rounded once.

As in linear.py, tiles of weights are read from their owners inside the loop, this rank's experts first.

[Note: row blocks] Only the device knows how many rows an expert has, so the grid has an upper bound of blocks and a
program finds its own. Let expert e come p-th, after r rows of others. Its blocks of B rows begin at number
r // B + min(p, r). So they never run into those of the next expert: it has c more rows before it, and
(r + c) // B >= r // B + ceil(c / B) - 1; the second term grows by at least 1 if c does. Programs with numbers in
between end at once, and S // B + min(E, S) is the upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, default_tile, dot, load_block, peer_address, store_block, tile_options
from .peers import COMPUTE_DTYPES, PeerShards, check_apart, check_bias, check_sums, check_tensor, join, require_shards
from .tiles import LinearTile


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Gated activation: maps N features to N / 2, silu(g) * u.

    limit: as gpt-oss has it: g is clamped from above and u to ±limit, and the result is g * sigmoid(alpha * g) * (u +
        1).
    alpha: of that; only with a limit.
    interleaved: g and u of feature i are columns 2 i and 2 i + 1, else i and N / 2 + i.

    Raises ValueError for a limit that is not positive, or an `alpha` without a limit.
    """

    limit: float | None = None
    alpha: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit is {self.limit}; give a positive number, or None for silu(g) * u")
        if self.limit is None and self.alpha != 1.0:
            raise ValueError(f"alpha is {self.alpha} without a limit, where it has no meaning; leave it 1.0")


@triton.jit
def block_of_rows(offsets, experts, first, number, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert of a block, and how many blocks of it come before: see [Note: row blocks]. `first` comes first."""
    e = tl.arange(0, BLOCK_E)
    before = tl.load(offsets + e, mask=e < experts, other=0) - tl.load(offsets + first)
    before += tl.where(e < first, tl.load(offsets + experts) - tl.load(offsets), 0)
    place = tl.where(e < first, e + experts, e) - first
    begin = before // BLOCK_S + tl.minimum(place, before)
    begun = (begin <= number) & (e < experts)
    expert = (first + tl.sum(begun.to(tl.int32)) - 1) % experts  # of those that begin here the last: others are empty
    return expert, number - tl.max(tl.where(begun, begin, 0))


@triton.jit(do_not_specialize=["first"])
def grouped_linear_kernel(
    x,
    offsets,
    w_table,
    b_table,
    y,
    pre,
    limit,
    alpha,
    experts,
    experts_per_owner,
    outputs,
    inputs,
    first,
    DTYPE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    columns = tl.cdiv(outputs, BLOCK_N)
    number = tl.program_id(0) // columns
    expert, block = block_of_rows(offsets, experts, first, number, BLOCK_T, BLOCK_E)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    blocks = tl.cdiv(end - begin, BLOCK_T)
    if block < blocks:
        # Among the programs of an expert: blocks of rows, up to GROUP of them, share a tile of the weight.
        index = block * columns + tl.program_id(0) % columns
        tile_s, tile_n = tl.swizzle2d(index // columns, index % columns, blocks, columns, GROUP)
        s = begin.to(tl.int64) + tile_s * BLOCK_T + tl.arange(0, BLOCK_T)
        s_in = s < end
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        n_in = n < outputs
        if HAS_GATE and not INTERLEAVED:  # a tile has as many columns of g as of u
            i = tl.arange(0, BLOCK_N)  # of a `tl.where` in n, triton 3.9 would not see its runs
            n_in = tile_n * HALF + i % HALF < outputs // 2
            n = tile_n * HALF + i % HALF + (i // HALF).to(tl.int64) * (outputs // 2)
        owner, local = expert // experts_per_owner, (expert % experts_per_owner).to(tl.int64)
        weight = peer_address(w_table, owner, DTYPE) + local * outputs * inputs
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        for start in range(0, inputs, BLOCK_K):
            k_in = start + k < inputs
            x_SK = load_block(x, inputs, s, s_in, start + k, k_in)
            if TRANSPOSED:
                w_KN = load_block(weight, outputs, start + k, k_in, n, n_in)
            else:
                w_KN = tl.trans(load_block(weight, inputs, n, n_in, start + k, k_in))
            acc = dot(x_SK, w_KN, acc, UPCAST)
        if b_table is not None:
            bias = peer_address(b_table, owner, DTYPE) + local * outputs
            acc += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
        if HAS_GATE:
            if pre is not None:
                store_block(pre, outputs, s, s_in, n, n_in, acc)
            if INTERLEAVED:
                g, u = tl.split(tl.reshape(acc, (BLOCK_T, HALF, 2)))
            else:
                g, u = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, HALF)), (0, 2, 1)))
            if limit is not None:
                g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
                u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
                u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
            act = g * tl.sigmoid(alpha * g) * u
            i = tile_n * HALF + tl.arange(0, HALF)
            store_block(y, outputs // 2, s, s_in, i, i < outputs // 2, act)
        else:
            store_block(y, outputs, s, s_in, n, n_in, acc)


def grouped_linear(
    *,
    x: torch.Tensor,
    offsets: torch.Tensor,
    weight: PeerShards,
    bias: PeerShards | None = None,
    out: torch.Tensor,
    transposed: bool = False,
    gate: Gate | None = None,
    pre: torch.Tensor | None = None,
    tile: LinearTile | None = None,
) -> None:
    """Writes y = x W_eᵀ + b_e into `out` [S, N]; with a gate its output into `out` [S, N / 2], and y into `pre` [S, N].

    Two ranks own an expert each, W_0 = [[1, 0], [0, 1]] and W_1 = [[1, 1], [2, 2]]. x = [[2, 5], [3, 4], [1, 1]] and
    offsets = [0, 1, 3] give out = [[2, 5], [7, 14], [2, 4]]: row 0 by rank 0's expert, rows 1 and 2 by rank 1's.

    Rows before offsets[0] and from offsets[E] on are neither read nor written, so a part of the experts may be given
    with its part of offsets. To start from separate expert tensors, build PeerShards with one expert per owner; `rank`
    is the expert to process first.

    x: [S, K], sorted by expert; S may be 0.
    offsets: int32 [E + 1] on the same device, ascending in [0, S]: expert e has rows offsets[e] to offsets[e + 1].
        These values are not checked: wrong ones access memory outside of the tensors.
    weight: [E, N, K], or if `transposed` [E, K, N].
    bias: [E, N]. All tensors but offsets are of one dtype.
    tile: sizes of the kernel's tiles, by default chosen from shapes and dtypes.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    outputs, inputs = check_experts(weight, offsets, transposed)
    if bias is not None:
        check_bias(bias, weight, shape=(weight.shape[0], outputs))
    if gate is None and pre is not None:
        raise ValueError("pre is given without a gate: it would be the same as out; leave it None")
    if gate is not None and outputs % 2:
        raise ValueError(f"the weight makes {outputs} features; a gate needs an even number, of g and of u")
    if pre is not None:
        check_tensor("pre", pre, shape=(len(x), outputs), dtype=weight.dtype, device=weight.device)
        check_apart("pre", pre, x, offsets, weight, bias)
    _launch("x", x, offsets, weight, out, outputs, inputs, transposed, tile, bias, gate, pre)


def grouped_linear_dx(
    *,
    dy: torch.Tensor,
    offsets: torch.Tensor,
    weight: PeerShards,
    out: torch.Tensor,
    transposed: bool = False,
    tile: LinearTile | None = None,
) -> None:
    """Writes dx = dy W_e into `out` [S, K].

    In the example of `grouped_linear`, dy of ones gives out = [[1, 1], [3, 3], [3, 3]].

    dy: [S, N].
    offsets, weight, transposed, tile: as in `grouped_linear`.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    outputs, inputs = check_experts(weight, offsets, transposed)
    # The other orientation's product: output features there are inputs here.
    _launch("dy", dy, offsets, weight, out, inputs, outputs, not transposed, tile)


def _launch(
    name: str,
    x: torch.Tensor,
    offsets: torch.Tensor,
    weight: PeerShards,
    out: torch.Tensor,
    outputs: int,
    inputs: int,
    transposed: bool,
    tile: LinearTile | None,
    bias: PeerShards | None = None,
    gate: Gate | None = None,
    pre: torch.Tensor | None = None,
) -> None:
    alike = {"dtype": weight.dtype, "device": weight.device}
    check_tensor(name, x, shape=(*x.shape[:1], inputs), **alike)
    check_tensor("out", out, shape=(len(x), outputs if gate is None else outputs // 2), **alike)
    check_apart("out", out, x, offsets, weight, bias, pre)
    if len(x) == 0 or weight.shape[0] == 0:
        return
    tile = tile or default_tile("grouped_linear", x, tokens=rows_of_expert(x, weight))
    experts = weight.shape[0]
    blocks = len(x) // tile.t + min(experts, len(x))
    grouped_linear_kernel[(blocks * triton.cdiv(outputs, tile.n),)](
        *(x, offsets, weight.table, None if bias is None else bias.table, out, pre),
        *((None, 1.0) if gate is None else (gate.limit, gate.alpha)),
        *(experts, weight.rows_per_owner, outputs, inputs),
        weight.rank * weight.rows_per_owner % experts,
        DTYPE=TL_DTYPES[x.dtype],
        HAS_GATE=gate is not None,
        INTERLEAVED=gate is not None and gate.interleaved,
        TRANSPOSED=transposed,
        BLOCK_E=triton.next_power_of_2(experts),
        GROUP=tile.group,
        **tile_options(tile),
    )


def rows_of_expert(x: torch.Tensor, weight: PeerShards) -> int:
    """The average, by which a tile is chosen."""
    return triton.cdiv(len(x), weight.shape[0])


def check_experts(
    weight: PeerShards, offsets: torch.Tensor, transposed: bool, *, sums: bool = False
) -> tuple[int, int]:
    """N and K. Raises ValueError unless `weight` has three dimensions, and `offsets` suit it."""
    require_shards("what gradients are added to" if sums else "the weight", weight)
    if len(weight.shape) != 3 or 0 in weight.shape[1:]:
        raise ValueError(
            f"the weight is {weight.shape}; give [E, N, K], or transposed [E, K, N], with N and K at least 1"
        )
    if sums:
        check_sums(weight)
    elif weight.dtype not in COMPUTE_DTYPES:
        raise ValueError(f"the weight is {weight.dtype}; give float32, bfloat16 or float16")
    check_tensor("offsets", offsets, shape=(weight.shape[0] + 1,), dtype=torch.int32, device=weight.device)
    outputs, inputs = weight.shape[:0:-1] if transposed else weight.shape[1:]
    return outputs, inputs


def rows_of_experts(offsets: torch.Tensor) -> list[slice]:
    """The rows of each expert."""
    return [slice(*pair) for pair in pairwise(offsets.tolist())]


def gate_ref(pre: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The gate in plain torch, in float64."""
    pre = pre.double()
    g, u = (pre[..., ::2], pre[..., 1::2]) if gate.interleaved else pre.chunk(2, dim=-1)
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit) + 1
    return g * torch.sigmoid(gate.alpha * g) * u


def grouped_linear_ref(
    x: torch.Tensor,
    offsets: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor] | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """y before a gate in plain torch, over all owners' shards, in float64; rows of no expert are NaN."""
    whole = join(weight).double()
    whole = whole if transposed else whole.mT
    y = x.new_full((len(x), whole.shape[2]), torch.nan, dtype=torch.float64)
    for e, rows in enumerate(rows_of_experts(offsets)):
        y[rows] = x[rows].double() @ whole[e] + (0 if bias is None else join(bias)[e].double())
    return y
