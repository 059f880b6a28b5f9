"""A linear layer whose weight arrives from the peers during the computation; y and dx as in linear.py.

This is the kernel for `staged`: `pull` (staged.py) makes the copy engine fetch each owner's W_o once into a local
buffer, its own first, then rank + 1, and so on; the kernel starts when its own is there and waits for each other
owner's rows by a flag.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .device import (
    TL_DTYPES,
    architecture,
    bulk_reads_follow,
    default_tile,
    dot,
    interpreting,
    load_block,
    makes_descriptors,
    peer_address,
    store_block,
    wait_for_shard,
)
from .linear import check_linear
from .peers import PeerShards, check_bias
from .staged import StagedWeight
from .tiles import STAGED_DX_ODD, STAGED_ODD, LinearTile

SPINS = 1 << 24  # polls of a flag before it counts as lost: about 10 s on a GPU
_LEFT_FREE = 8  # multiprocessors


@triton.jit(do_not_specialize=["epoch", "spins", "tokens", "rank"])
def linear_staged_kernel(
    x,
    w,
    b_table,
    y,
    flags,
    status,
    epoch,
    spins,
    tokens,
    rows,
    rows_per_owner,
    columns,
    rank,
    world,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BULK: tl.constexpr,
    BULK_OUT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles_t, tiles_n = tl.cdiv(tokens, BLOCK_T), tl.cdiv(rows_per_owner, BLOCK_N)
    owner_tiles = tiles_t * tiles_n  # no tile has rows of two owners
    if BULK:
        owner_stride = tl.cast(rows_per_owner, tl.int64) * columns
        x_bulk = tl.make_tensor_descriptor(x, [tokens, columns], [columns, 1], [BLOCK_T, BLOCK_K])
        w_bulk = tl.make_tensor_descriptor(
            w, [world, rows_per_owner, columns], [owner_stride, columns, 1], [1, BLOCK_N, BLOCK_K]
        )
    if BULK_OUT:
        y_bulk = tl.make_tensor_descriptor(y, [tokens, rows], [rows, 1], [BLOCK_T, BLOCK_N])
    waited_for = -1
    arrived = True
    patience = spins
    for tile in tl.range(tl.program_id(0), owner_tiles * world, tl.num_programs(0)):
        turn = tile // owner_tiles
        owner = (rank + turn) % world  # in order of arrival
        tile_t, tile_n = tl.swizzle2d(
            tile % owner_tiles // tiles_n, tile % owner_tiles % tiles_n, tiles_t, tiles_n, GROUP
        )
        first_row = tl.cast(owner, tl.int64) * rows_per_owner
        owned = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner).to(tl.int32)
        if tile_n * BLOCK_N < owned:
            if turn != waited_for:
                arrived = wait_for_shard(flags, status, owner, epoch, patience)
                patience = tl.where(arrived, patience, 1)  # one timeout is long enough
                waited_for = turn
                if BULK and not UPCAST:
                    bulk_reads_follow()
            t = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
            n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            k = tl.arange(0, BLOCK_K)
            acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
            if HAS_BIAS:
                # Added before the loop: after it there are no registers for it. Loaded 8 times over: spread over the
                # threads it would be single loads of 2 bytes.
                offsets = n[None, :] + tl.zeros((8, BLOCK_N), dtype=tl.int32)
                bias_8N = tl.load(peer_address(b_table, owner, DTYPE) + offsets, mask=offsets < owned, other=0.0)
                acc += tl.sum(bias_8N.to(tl.float32) * 0.125, axis=0)[None, :]
            for start in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
                if BULK:
                    x_TK = x_bulk.load([tile_t * BLOCK_T, start])
                    w_NK = w_bulk.load([owner, tile_n * BLOCK_N, start]).reshape(BLOCK_N, BLOCK_K)
                else:
                    k_in = start + k < columns
                    x_TK = load_block(x, columns, t, t < tokens, start + k, k_in)
                    w_NK = load_block(w, columns, first_row + n, n < owned, start + k, k_in)
                acc = dot(x_TK, tl.trans(w_NK), acc, UPCAST)
            acc = tl.where(arrived, acc, float("nan"))
            if BULK_OUT:
                y_bulk.store([tile_t * BLOCK_T, first_row.to(tl.int32) + tile_n * BLOCK_N], acc.to(DTYPE))
            else:
                store_block(y, rows, t, t < tokens, first_row + n, n < owned, acc)


@triton.jit(do_not_specialize=["epoch", "spins", "tokens", "rank"])
def linear_dx_staged_kernel(
    dy,
    w,
    dx,
    flags,
    status,
    epoch,
    spins,
    tokens,
    rows,
    rows_per_owner,
    columns,
    rank,
    world,
    DTYPE: tl.constexpr,
    BULK: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles_t, tiles_k = tl.cdiv(tokens, BLOCK_T), tl.cdiv(columns, BLOCK_K)
    owner_steps = tl.cdiv(rows_per_owner, BLOCK_N)  # no step has rows of two owners
    if BULK:
        owner_stride = tl.cast(rows_per_owner, tl.int64) * columns
        dy_bulk = tl.make_tensor_descriptor(dy, [tokens, rows], [rows, 1], [BLOCK_T, BLOCK_N])
        w_bulk = tl.make_tensor_descriptor(
            w, [world, rows_per_owner, columns], [owner_stride, columns, 1], [1, BLOCK_N, BLOCK_K]
        )
        dx_bulk = tl.make_tensor_descriptor(dx, [tokens, columns], [columns, 1], [BLOCK_T, BLOCK_K])
    arrived = True
    for tile in tl.range(tl.program_id(0), tiles_t * tiles_k, tl.num_programs(0)):
        tile_t, tile_k = tl.swizzle2d(tile // tiles_k, tile % tiles_k, tiles_t, tiles_k, GROUP)
        t = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
        # The first tile waits for each owner; after it all have arrived, and one long loop keeps its loads going.
        first = tile == tl.program_id(0)
        segments = tl.where(first, world, 1)
        segment_steps = owner_steps * world // segments
        for segment in range(segments):
            if first:
                here = wait_for_shard(flags, status, (rank + segment) % world, epoch, tl.where(arrived, spins, 1))
                arrived = arrived & here
                if BULK and not UPCAST:
                    bulk_reads_follow()
            for step in tl.range(segment * segment_steps, (segment + 1) * segment_steps, num_stages=STAGES):
                owner = (rank + step // owner_steps) % world
                first_row = tl.cast(owner, tl.int64) * rows_per_owner
                row = step % owner_steps * BLOCK_N
                if BULK:
                    # Past an owner's last row the weight reads as zeros.
                    dy_TN = dy_bulk.load([tile_t * BLOCK_T, first_row.to(tl.int32) + row])
                    w_NK = w_bulk.load([owner, row, tile_k * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
                else:
                    owned = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner)
                    n = row + tl.arange(0, BLOCK_N)
                    dy_TN = load_block(dy, rows, t, t < tokens, first_row + n, n < owned)
                    w_NK = load_block(w, columns, first_row + n, n < owned, k, k < columns)
                acc = dot(dy_TN, w_NK, acc, UPCAST)
        acc = tl.where(arrived, acc, float("nan"))
        if BULK:
            dx_bulk.store([tile_t * BLOCK_T, tile_k * BLOCK_K], acc.to(DTYPE))
        else:
            store_block(dx, columns, t, t < tokens, k, k < columns, acc)


@makes_descriptors
def linear_staged(
    *,
    x: torch.Tensor,
    weight: StagedWeight,
    bias: PeerShards | None = None,
    out: torch.Tensor,
    tile: LinearTile | None = None,
    spins: int = SPINS,
) -> None:
    """Writes y = x Wᵀ + b into `out`, waiting for the rows of `weight` as they arrive.

    With W as in `linear`, rank 0 computes columns 0 and 1 of [[2, 5, 7]] while row 2 is still in transfer from rank 1.
    If that never arrives, out is [[2, 5, nan]].

    x: [T, K], weight: [N, K] as `pull` returned it, bias: [N], out: [T, N], all of one dtype; T may be 0.
    tile: sizes of the kernel's tiles, by default chosen from shapes and dtypes.
    spins: polls of an owner's flag after which the kernel gives up: outputs from its rows are NaN and `check` raises.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    check_linear("x", x, out, weight, columns_of=1)
    _check_pulled(weight, spins)
    if bias is not None:
        check_bias(bias, weight)
    tokens, rows = x.shape[0], weight.shape[0]
    if tokens == 0 or rows == 0:
        return
    vectors = _vectors(weight, x, out)
    bulk = vectors and _has_tma(x.device)
    tile = tile or _tile("linear_staged", x, vectors, STAGED_ODD)
    tiles = triton.cdiv(tokens, tile.t) * triton.cdiv(weight.rows_per_owner, tile.n) * weight.world
    linear_staged_kernel[(min(_programs(weight), tiles),)](
        x,
        weight.buffer,
        weight.flags if bias is None else bias.table,
        out,
        HAS_BIAS=bias is not None,
        BULK=bulk,
        # Only whole tiles are stored in bulk: another owner's columns begin after an odd one.
        BULK_OUT=bulk and weight.rows_per_owner % tile.n == 0,
        **_shared(x, weight, spins, tile),
    )
    weight.is_read_now()


@makes_descriptors
def linear_dx_staged(
    *,
    dy: torch.Tensor,
    weight: StagedWeight,
    out: torch.Tensor,
    tile: LinearTile | None = None,
    spins: int = SPINS,
) -> None:
    """Writes dx = dy W into `out`, waiting for the rows of `weight` as they arrive.

    With W as in `linear`, dy = [[1, 1, 1]] gives out = [[2, 2]] when row 2 has arrived from rank 1, else [[nan, nan]].

    dy: [T, N], weight: [N, K] as `pull` returned it, out: [T, K], all of one dtype; T may be 0.
    tile, spins: as in `linear_staged`. If an owner's rows don't arrive, all of `out` is NaN.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    check_linear("dy", dy, out, weight, columns_of=0)
    _check_pulled(weight, spins)
    tokens, columns = dy.shape[0], weight.shape[1]
    if tokens == 0 or columns == 0:
        return
    vectors = _vectors(weight, dy, out)
    tile = tile or _tile("linear_dx_staged", dy, vectors, STAGED_DX_ODD)
    tiles = triton.cdiv(tokens, tile.t) * triton.cdiv(columns, tile.k)
    linear_dx_staged_kernel[(min(_programs(weight), tiles),)](
        dy,
        weight.buffer,
        out,
        BULK=vectors and _has_tma(dy.device),
        **_shared(dy, weight, spins, tile),
    )
    weight.is_read_now()


def _check_pulled(weight: StagedWeight, spins: int) -> None:
    if weight.epoch == 0:
        raise ValueError("the weight is of epoch 0, never pulled: give what `pull` returned")
    if not 1 <= spins < 2**31:
        raise ValueError(f"spins is {spins}; give 1 to 2^31 - 1 polls of a flag")


def _shared(value: torch.Tensor, weight: StagedWeight, spins: int, tile: LinearTile) -> dict[str, Any]:
    """The arguments that both kernels take, for x or dy."""
    return {
        "flags": weight.flags,
        "status": weight.status,
        "epoch": weight.epoch,
        "spins": spins,
        "tokens": value.shape[0],
        "rows": weight.shape[0],
        "rows_per_owner": weight.rows_per_owner,
        "columns": weight.shape[1],
        "rank": weight.rank,
        "world": weight.world,
        "DTYPE": TL_DTYPES[value.dtype],
        "UPCAST": interpreting(),
        "BLOCK_T": tile.t,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP": tile.group,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


def _vectors(weight: StagedWeight, *matrices: torch.Tensor) -> bool:
    """True if rows and owners begin at multiples of 16 elements, as TMA and triton's vector loads need."""
    sizes = (*weight.shape, weight.rows_per_owner)
    return all(size and size % 16 == 0 for size in sizes) and all(m.data_ptr() % 16 == 0 for m in matrices)


def _tile(operator: str, value: torch.Tensor, vectors: bool, odd: LinearTile) -> LinearTile:
    """The table's tile, or `odd`: addresses of 2-byte elements loaded singly leave no registers for a larger one."""
    return default_tile(operator, value) if vectors or value.element_size() > 2 else odd


def _programs(weight: StagedWeight) -> int:
    """One program per multiprocessor. In the interpreter a few, so that each has several tiles as on a GPU.

    While rows arrive over a link some multiprocessors stay free, in case a driver copies them by a kernel.
    """
    if interpreting():
        return 3
    all_of_them = torch.cuda.get_device_properties(weight.device).multi_processor_count
    return all_of_them - (_LEFT_FREE if weight.has_far else 0)


def _has_tma(device: torch.device) -> bool:
    """True if the device has TMA."""
    return interpreting() or architecture(device) >= 90
