"""Owners' shards to one local tensor.

    out[o n + i, :] = cast(shard_o[i, :])

N rows in all, n = ceil(N / R) per owner, K elements a row; R owners. One program copies BLOCK consecutive elements of
one owner; programs of a rank begin at the owner behind it and come to its
own shard last, so that ranks read different owners at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, peer_address, turn
from .peers import PeerShards, join


@triton.jit(do_not_specialize=["rows", "rank"])
def gather_kernel(
    table,
    out,
    rows,
    rows_per_owner,
    row_elements,
    rank,
    world,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner = turn(tl.program_id(1), rank, world)
    first_row = owner.to(tl.int64) * rows_per_owner
    count = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner) * row_elements
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < count:
        source = peer_address(table, owner, DTYPE)
        base = first_row * row_elements
        if ALIGNED:
            base = tl.multiple_of(base, 16)
        target = out + base
        offsets = start + tl.arange(0, BLOCK)
        if start + BLOCK <= count:  # without a mask, so that loads and stores stay vectors
            values = tl.load(source + offsets)
            tl.store(target + offsets, values.to(out.dtype.element_ty))
        else:
            mask = offsets < count
            values = tl.load(source + offsets, mask=mask)
            tl.store(target + offsets, values.to(out.dtype.element_ty), mask=mask)


def gather(*, peers: PeerShards, out: torch.Tensor, block: int = 4096, num_warps: int = 4) -> None:
    """Writes the whole tensor [N, ...] of `peers` into `out`, cast to its dtype.

    Raises ValueError when `out` has another shape or device, or is not contiguous.
    """
    if tuple(out.shape) != peers.shape or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}; give a contiguous {peers.shape}")
    if out.device != peers.device:
        raise ValueError(f"out is on {out.device} and the shards' table on {peers.device}; both must be on one device")
    if out.dtype not in TL_DTYPES or peers.dtype not in TL_DTYPES:
        raise ValueError(f"can't gather {peers.dtype} into {out.dtype}; floating-point dtypes only")
    elements = peers.rows_per_owner * peers.row_elements
    if elements == 0:
        return
    gather_kernel[(triton.cdiv(elements, block), peers.world)](
        peers.table,
        out,
        peers.shape[0],
        peers.rows_per_owner,
        peers.row_elements,
        peers.rank,
        peers.world,
        DTYPE=TL_DTYPES[peers.dtype],
        ALIGNED=elements % 16 == 0,
        BLOCK=block,
        num_warps=num_warps,
    )


def gather_ref(shards: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The same in plain torch, over all owners' shards."""
    return join(shards).to(dtype)
