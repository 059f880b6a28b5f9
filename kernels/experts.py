"""The linear layers of experts whose weights are on the peers: each row is multiplied by the weight of its expert.

    y[s, n]     = sum_k x[s, k] W_e[n, k] + b_e[n]                 rows s of expert e: offsets[e] <= s < offsets[e + 1]
    dx[s, k]    = sum_n dy[s, n] W_e[n, k]
    dW_e[n, k] += scale * sum_s dy[s, n] x[s, k],     db_e[n] += scale * sum_s dy[s, n]         only if e has rows

S rows sorted by expert, E experts, N output features, K input features; W_e is [N, K], or [K, N] if `transposed`. Owner
o of R has the experts o m .. (o + 1) m - 1, m = ceil(E / R). A gate makes I = N / 2 features of y, see `Gate`.
Everything is fp32 until each result is rounded once.

As in linear.py, tiles of weights are read from their owners inside the loop, this rank's experts first; as in wgrad.py,
tiles of dW are added straight into their owners, the next rank's experts first.

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
from typing import Any

import torch
import triton
import triton.language as tl

from .device import (
    TL_DTYPES,
    add_to_peer,
    adds_in_bulk,
    architecture,
    dot,
    interpreting,
    makes_descriptors,
    peer_address,
    sum_address,
    summand,
)
from .peers import COMPUTE_DTYPES, PeerShards, check_alike, check_apart, check_sums, check_tensor, join, require_shards
from .tiles import LinearTile, WgradTile, of_integers, tile_of

BIAS_BLOCK_S, BIAS_BLOCK_N = 32, 128  # of a program that sums a bias's gradient


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
            x_SK = tl.load(
                x + s[:, None] * inputs + (start + k)[None, :], mask=s_in[:, None] & k_in[None, :], other=0.0
            )
            if TRANSPOSED:
                w_KN = tl.load(
                    weight + (start + k).to(tl.int64)[:, None] * outputs + n[None, :],
                    mask=k_in[:, None] & n_in[None, :],
                    other=0.0,
                )
            else:
                w_NK = tl.load(
                    weight + n.to(tl.int64)[:, None] * inputs + (start + k)[None, :],
                    mask=n_in[:, None] & k_in[None, :],
                    other=0.0,
                )
                w_KN = tl.trans(w_NK)
            acc = dot(x_SK, w_KN, acc, UPCAST)
        if b_table is not None:
            bias = peer_address(b_table, owner, DTYPE) + local * outputs
            acc += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
        if HAS_GATE:
            if pre is not None:
                tl.store(pre + s[:, None] * outputs + n[None, :], acc.to(DTYPE), mask=s_in[:, None] & n_in[None, :])
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
            width = outputs // 2
            tl.store(y + s[:, None] * width + i[None, :], act.to(DTYPE), mask=s_in[:, None] & (i < width)[None, :])
        else:
            tl.store(y + s[:, None] * outputs + n[None, :], acc.to(DTYPE), mask=s_in[:, None] & n_in[None, :])


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
            dy_SN = tl.load(dy + s[:, None] * rows + n[None, :], mask=s_in[:, None] & n_in[None, :], other=0.0)
            x_SK = tl.load(x + s[:, None] * columns + k[None, :], mask=s_in[:, None] & k_in[None, :], other=0.0)
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
            mask = (s < end)[:, None] & n_in[None, :]
            acc += tl.load(dy + s[:, None] * columns + n[None, :], mask=mask, other=0.0).to(tl.float32)
        local = (expert % experts_per_owner).to(tl.int64)
        target = sum_address(b_table, expert // experts_per_owner, largest) + local * columns
        add_to_peer(target + n, summand(tl.sum(acc, axis=0) * scale, factor, largest), n_in)


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
    outputs, inputs = _check(weight, offsets, transposed)
    if bias is not None:
        _check_bias(bias, weight, outputs)
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
    outputs, inputs = _check(weight, offsets, transposed)
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
    traits = _traits(x, weight)
    tile = tile or tile_of("grouped_linear", **traits)
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
        **_blocks(tile),
    )


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
    outputs, inputs = _check(weight, offsets, transposed, sums=True)
    check_tensor("dy", dy, shape=(*dy.shape[:1], outputs), dtype=COMPUTE_DTYPES, device=weight.device)
    check_tensor("x", x, shape=(len(dy), inputs), dtype=dy.dtype, device=weight.device)
    if bias is not None:
        _check_bias(bias, weight, outputs)
        check_sums(bias)
    experts, (down, across) = weight.shape[0], weight.shape[1:]
    if len(x) == 0 or experts == 0:
        return
    traits = _traits(x, weight)
    tile = tile or tile_of("wgrad", **traits)
    bulk = traits["arch"] >= 90 and across * weight.dtype.itemsize % 16 == 0 and adds_in_bulk(weight)
    if weight.exact is not None:
        tile = of_integers(tile, arch=traits["arch"], bulk=bulk)
    first = (weight.rank + 1) * weight.rows_per_owner % experts
    grouped_wgrad_kernel[(triton.cdiv(down, tile.n) * triton.cdiv(across, tile.k), experts)](
        *((x, dy) if transposed else (dy, x)),
        *(offsets, weight.table, scale, experts, weight.rows_per_owner, down, across, first),
        *weight.adding,
        BULK=bulk,
        **_blocks(tile),
    )
    if bias is not None:
        grouped_bias_grad_kernel[(triton.cdiv(outputs, BIAS_BLOCK_N), experts)](
            *(dy, offsets, bias.table, scale, experts, bias.rows_per_owner, outputs, first),
            *bias.adding,
            BLOCK_S=BIAS_BLOCK_S,
            BLOCK_N=BIAS_BLOCK_N,
        )


def _traits(rows: torch.Tensor, weight: PeerShards) -> dict[str, int]:
    """Arguments of the choice of a tile: by the rows of an expert on average."""
    arch, tokens = architecture(rows.device), triton.cdiv(len(rows), weight.shape[0])
    return {"element_bytes": rows.element_size(), "arch": arch, "tokens": tokens}


def _blocks(tile: Any) -> dict[str, Any]:
    sizes = {"BLOCK_T": tile.t, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": tile.group}
    return {"UPCAST": interpreting(), **sizes, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _check(weight: PeerShards, offsets: torch.Tensor, transposed: bool, *, sums: bool = False) -> tuple[int, int]:
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


def _check_bias(bias: PeerShards, weight: PeerShards, outputs: int) -> None:
    check_alike("the bias", bias, "weight", weight, shape=(weight.shape[0], outputs), dtype=weight.dtype)


def _parts(offsets: torch.Tensor) -> list[slice]:
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
    for e, rows in enumerate(_parts(offsets)):
        y[rows] = x[rows].double() @ whole[e] + (0 if bias is None else join(bias)[e].double())
    return y


def grouped_linear_dx_ref(
    dy: torch.Tensor, offsets: torch.Tensor, weight: Sequence[torch.Tensor], *, transposed: bool = False
) -> torch.Tensor:
    """dx in plain torch, over all owners' shards, in float64; rows of no expert are NaN."""
    return grouped_linear_ref(dy, offsets, weight, transposed=not transposed)


def grouped_wgrad_ref(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, *, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added at scale 1 to the whole weight and the whole bias [E, N], in plain torch, in float64."""
    dy, x, parts = dy.double(), x.double(), _parts(offsets)
    dw = torch.stack([dy[rows].T @ x[rows] for rows in parts])
    return dw.mT if transposed else dw, torch.stack([dy[rows].sum(0) for rows in parts])
