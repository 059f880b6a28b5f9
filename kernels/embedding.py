"""An embedding whose table is on the peers: rows are read from their owners, and gradients added to them.

    y[t, :]     = W_o[id_t - o n, :]                             o = id_t // n
    dW_o[i, :] += scale * sum_{t: id_t = o n + i} dy[t, :]       in fp32, then added in fp32 or exactly (device.py)

T tokens, N rows (the vocabulary) in all, n = ceil(N / R) of them per owner, K columns; R owners.

[Note: runs] An id's rows of dy are summed here before they cross the link, and each distinct id is added to its owner
once. Sorting the ids makes equal ids neighbours: a *run*. A run is cut into segments of SEGMENT tokens from its start;
the program of a segment's first position sums it, those of all other positions return at once. A run of one segment is
added directly to its owner. The segments of a longer run (a padding token, ten thousand times) are summed in parallel
into a scratch buffer, which a second kernel sums up. No length is read back to the host.

[Note: slots] The segment that begins at position p has the row 2 (p // SEGMENT) + (1 if it is its run's first) of the
scratch buffer. Only runs longer than SEGMENT use it, so between two multiples of SEGMENT at most one such run begins,
and at most one later segment: no two segments share a row.

Sorting groups ids by owner. Ranks begin at different quantiles of that order, so they add to different owners at a
time, even when most ids are small, as in text. Reading is in token order, which mixes owners anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, add_to_peer, load_block, peer_address, sum_address, summand
from .peers import COMPUTE_DTYPES, PeerShards, check_apart, check_sums, check_tensor, join, require_shards
from .tiles import EMBEDDING, EMBEDDING_GRAD, EmbeddingGradTile, EmbeddingTile


@triton.jit(do_not_specialize=["rows", "rows_per_owner"])
def embedding_kernel(
    ids,
    table,
    out,
    rows,
    rows_per_owner,
    columns,
    DTYPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + t).to(tl.int64)
    known = (row >= 0) & (row < rows)
    owner = tl.where(known, row // rows_per_owner, 0)
    source = peer_address(table, owner, DTYPE) + (row - owner * rows_per_owner) * columns
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    # Not `known & (k < columns)`, which the compiler accepts too: the interpreter broadcasts the scalar over a block in
    # the type of what was compared, int64, and triton 3.9's refuses such a mask.
    readable = tl.where(known, columns, 0)
    values = tl.load(source + k, mask=k < readable, other=float("nan"))
    tl.store(out + t * columns + k, values, mask=k < columns)


@triton.jit
def _trains(row, rows, padding):
    """True if an id has a gradient: it is a row of the table and not the padding (-1: none)."""
    return (row >= 0) & (row < rows) & (row != padding)


@triton.jit
def _add_row(table, row, rows_per_owner, columns, k, value, factor, largest):
    owner = row // rows_per_owner
    target = sum_address(table, owner, largest) + (row - owner * rows_per_owner) * columns
    add_to_peer(target + k, summand(value, factor, largest), k < columns)


@triton.jit(do_not_specialize=["tokens", "shift", "rows", "rows_per_owner", "padding"])
def embedding_grad_kernel(
    dy,
    ids,
    order,
    begins,
    ends,
    table,
    partial,
    scale,
    tokens,
    shift,
    rows,
    rows_per_owner,
    columns,
    padding,
    factor,
    largest,
    SEGMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    position = (tl.program_id(0).to(tl.int64) + shift) % tokens
    begin = tl.load(begins + position)
    row = tl.load(ids + position).to(tl.int64)
    if _trains(row, rows, padding) & ((position - begin) % SEGMENT == 0):
        end = tl.load(ends + position)
        stop = tl.minimum(position + SEGMENT, end)
        k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
        for start in range(position, stop, BLOCK_T):
            at = start + tl.arange(0, BLOCK_T)
            t = tl.load(order + at, mask=at < stop, other=0)
            acc += load_block(dy, columns, t, at < stop, k, k < columns).to(tl.float32)
        total = tl.sum(acc, axis=0)
        if end - begin <= SEGMENT:
            _add_row(table, row, rows_per_owner, columns, k, total * scale, factor, largest)
        else:
            slot = 2 * (position // SEGMENT) + (position == begin).to(tl.int64)  # [Note: slots]
            tl.store(partial + slot * columns + k, total, mask=k < columns)


@triton.jit(do_not_specialize=["tokens", "rows", "rows_per_owner", "padding"])
def embedding_grad_long_kernel(
    ids,
    begins,
    ends,
    table,
    partial,
    scale,
    tokens,
    rows,
    rows_per_owner,
    columns,
    padding,
    factor,
    largest,
    SEGMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for the only run longer than SEGMENT, if any, that begins at one of SEGMENT positions."""
    segment = tl.program_id(0).to(tl.int64)
    positions = segment * SEGMENT + tl.arange(0, SEGMENT)
    begin = tl.load(begins + positions, mask=positions < tokens, other=-1)
    end = tl.load(ends + positions, mask=positions < tokens, other=0)
    first = tl.max(tl.where((begin == positions) & (end - positions > SEGMENT), positions, -1))
    if first >= 0:
        row = tl.load(ids + first).to(tl.int64)
        if _trains(row, rows, padding):
            parts = tl.cdiv(tl.load(ends + first) - first, SEGMENT)
            k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
            acc = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
            for start in range(0, parts, BLOCK_T):
                part = start + tl.arange(0, BLOCK_T)
                slot = 2 * (segment + part) + (part == 0).to(tl.int64)
                acc += load_block(partial, columns, slot, part < parts, k, k < columns)
            _add_row(table, row, rows_per_owner, columns, k, tl.sum(acc, axis=0) * scale, factor, largest)


def embedding(*, ids: torch.Tensor, weight: PeerShards, out: torch.Tensor, tile: EmbeddingTile = EMBEDDING) -> None:
    """Writes the rows `ids` [T] of `weight` [N, K] into `out` [T, K], of the weight's dtype.

    Two ranks own [[10, 11], [20, 21]] and [[30, 31]]. ids = [2, 0, 2] gives out = [[30, 31], [10, 11], [30, 31]].

    Only these rows cross the link, one for each token. An id outside 0..N-1 can't be refused without waiting for the
    device: it reads nothing, and its row of `out` becomes NaN.

    ids: [T], int64 or int32; T may be 0.
    tile: the columns that a program copies.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    _check(ids, weight)
    check_tensor("out", out, shape=(len(ids), weight.shape[1]), dtype=weight.dtype, device=weight.device)
    check_apart("out", out, ids, weight)
    if weight.dtype not in COMPUTE_DTYPES:
        raise ValueError(f"the weight is {weight.dtype}; give float32, bfloat16 or float16")
    tokens, (rows, columns) = ids.shape[0], weight.shape
    if tokens == 0 or columns == 0:
        return
    embedding_kernel[(tokens, triton.cdiv(columns, tile.k))](
        ids,
        weight.table,
        out,
        rows,
        max(weight.rows_per_owner, 1),  # a divisor, even for an empty vocabulary
        columns,
        DTYPE=TL_DTYPES[weight.dtype],
        BLOCK_K=tile.k,
        num_warps=tile.num_warps,
    )


def embedding_grad(
    *,
    dy: torch.Tensor,
    ids: torch.Tensor,
    weight: PeerShards,
    scale: float = 1.0,
    padding_idx: int | None = None,
    tile: EmbeddingGradTile = EMBEDDING_GRAD,
) -> None:
    """Adds scale * the rows of `dy` [T, K] into the rows `ids` [T] of `weight` [N, K].

    Two ranks own two rows and one. ids = [2, 0, 2] and dy = [[1, 1], [2, 2], [3, 3]] add [2, 2] to row 0, on rank 0,
    and [4, 4] to row 2, on rank 1, in one addition.

    Rows of equal ids are summed in fp32 first: each distinct id is added to its owner once. Ids outside 0..N-1 add
    nothing. Takes 8 K / `tile.segment` bytes of scratch memory a token, and never waits for the device.

    dy: [T, K], fp32, bf16 or fp16.
    ids: [T], int64 or int32; T may be 0.
    padding_idx: an id without a gradient, as in `torch.nn.Embedding`.

    Raises ValueError for other shapes, dtypes, devices or layouts and for a `padding_idx` outside 0..N-1, before a
    launch.
    """
    _check(ids, weight)
    check_tensor("dy", dy, shape=(len(ids), weight.shape[1]), dtype=COMPUTE_DTYPES, device=weight.device)
    tokens, (rows, columns) = ids.shape[0], weight.shape
    check_sums(weight)
    if padding_idx is not None and not 0 <= padding_idx < rows:
        raise ValueError(
            f"padding_idx is {padding_idx}; give None or one of 0..{rows - 1} (a negative one plus {rows})"
        )
    if tokens == 0 or rows == 0 or columns == 0:
        return
    sorted_ids, order = torch.sort(ids, stable=True)
    begins = torch.searchsorted(sorted_ids, sorted_ids)
    ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
    padding = -1 if padding_idx is None else padding_idx
    segments = triton.cdiv(tokens, tile.segment) if tokens > tile.segment else 0  # 0: no run can be longer
    partial = torch.empty(2 * segments, columns, dtype=torch.float32, device=dy.device)
    blocks = triton.cdiv(columns, tile.k)
    shape = {"SEGMENT": tile.segment, "BLOCK_T": tile.t, "BLOCK_K": tile.k, "num_warps": tile.num_warps}
    embedding_grad_kernel[(tokens, blocks)](
        dy,
        sorted_ids,
        order,
        begins,
        ends,
        weight.table,
        partial,
        scale,
        tokens,
        (weight.rank + 1) * tokens // weight.world,
        rows,
        weight.rows_per_owner,
        columns,
        padding,
        *weight.adding,
        **shape,
    )
    if segments:
        embedding_grad_long_kernel[(segments, blocks)](
            sorted_ids,
            begins,
            ends,
            weight.table,
            partial,
            scale,
            tokens,
            rows,
            weight.rows_per_owner,
            columns,
            padding,
            *weight.adding,
            **shape,
        )


def _check(ids: torch.Tensor, weight: PeerShards) -> None:
    require_shards("the weight", weight)
    if len(weight.shape) != 2:
        raise ValueError(f"the weight is {weight.shape}; give two dimensions [N, K]")
    if ids.ndim != 1:
        raise ValueError(f"ids is {tuple(ids.shape)}; give [T] (flatten batches)")
    check_tensor("ids", ids, shape=tuple(ids.shape), dtype=(torch.int64, torch.int32), device=weight.device)


def embedding_ref(ids: torch.Tensor, weight: list[torch.Tensor]) -> torch.Tensor:
    """The same in plain torch, over all owners' shards, in float64."""
    whole = join(weight).double()
    out = whole.new_full((len(ids), whole.shape[1]), torch.nan)
    known = (ids >= 0) & (ids < len(whole))
    out[known] = whole[ids[known].long()]
    return out


def embedding_grad_ref(
    dy: torch.Tensor, ids: torch.Tensor, weight: list[torch.Tensor], scale: float, padding_idx: int | None
) -> list[torch.Tensor]:
    """The same in plain torch, over all owners' shards: their final values, in float64."""
    whole = join(weight).double()
    trains = (ids >= 0) & (ids < len(whole))
    if padding_idx is not None:
        trains &= ids != padding_idx
    whole.index_add_(0, ids[trains].long(), scale * dy[trains].double())
    return list(whole.split([len(shard) for shard in weight]))
