"""Gathers owners' shards into one local tensor, or those of many small tensors at once.

    out[o n + i, :] = cast(shard_o[i, :])

N rows in all, n = ceil(N / R) per owner, K elements a row; R owners. One program copies BLOCK consecutive elements of
one owner. A rank reads the next rank's shard first, then those after it, and its own shard last, so ranks read
different owners at any one time.

    out[offset_p + i] = shard_p[i]        `gather_many`

A shard p is one owner's part of one of several tensors. A copy costs the host microseconds, for a norm's weight more
than the link takes, so all shards of a unit's small tensors are gathered in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .device import TL_DTYPES, peer_address, turn
from .peers import ALIGNMENT_BYTES, PeerShards, check_apart, check_tensor, join, require_shards


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


def gather(*, peers: PeerShards, out: torch.Tensor, block: int = 4096) -> None:
    """Writes the whole tensor [N, ...] of `peers` into `out`, cast to its dtype.

    Two ranks hold [[1], [2]] and [[3]] of N = 3 rows. Both get out = [[1], [2], [3]]; rank 0 reads rank 1's row first
    and then its own, rank 1 the other way round.

    block: elements that a program copies.

    Raises ValueError if `out` has another shape or device, or is not contiguous.
    """
    require_shards("peers", peers)
    check_tensor("out", out, shape=peers.shape, dtype=tuple(TL_DTYPES), device=peers.device)
    check_apart("out", out, peers)
    if peers.dtype not in TL_DTYPES:
        raise ValueError(f"the shards are {peers.dtype}; floating-point dtypes only")
    elements = peers.rows_per_owner * peers.row_elements
    if elements == 0:
        return
    gather_kernel[(triton.cdiv(elements, block), peers.world)](
        peers.table,
        out,
        *peers.layout,
        DTYPE=TL_DTYPES[peers.dtype],
        ALIGNED=elements % 16 == 0,
        BLOCK=block,
    )


@triton.jit
def gather_many_kernel(sources, offsets, counts, out, DTYPE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    shard = tl.program_id(1)
    # If all are multiples of 16 bytes, loads and stores are vectors.
    count = tl.multiple_of(tl.load(counts + shard), EVEN)
    offset = tl.multiple_of(tl.load(offsets + shard), EVEN)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < count:
        at = start + tl.arange(0, BLOCK)
        values = tl.load(peer_address(sources, shard, DTYPE) + at, mask=at < count)
        tl.store(out + offset + at, values, mask=at < count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardList:
    """Shards of one dtype and their offsets, for `gather_many`: int64 tables on the kernel's device.

    `sources`: addresses; `offsets`: elements from the start of the result; `counts`: elements; `most`: the largest.
    `even`: all offsets and counts are multiples of this many elements: 16 bytes' worth, or 1.
    """

    sources: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    most: int
    even: int
    dtype: torch.dtype

    @classmethod
    def of(cls, shards: Sequence[torch.Tensor], offsets: Sequence[int]) -> ShardList:
        """`shards`: contiguous, on one device, kept alive by the caller; `offsets`: in the result, in elements.

        Raises ValueError for shards of several dtypes, or at an address that is not a multiple of 16 bytes.
        """
        kinds = {shard.dtype for shard in shards}
        if len(kinds) != 1 or len(shards) != len(offsets):
            raise ValueError(f"{len(shards)} shards of {kinds} and {len(offsets)} offsets; give one dtype, one of each")
        for shard in shards:
            if shard.data_ptr() % ALIGNMENT_BYTES or not shard.is_contiguous():
                raise ValueError(
                    f"a shard is at {shard.data_ptr():#x} with strides {shard.stride()}; it must be contiguous, and "
                    f"aligned to {ALIGNMENT_BYTES} bytes"
                )
        device, counts = shards[0].device, [shard.numel() for shard in shards]
        vector = ALIGNMENT_BYTES // shards[0].element_size()

        def table(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            sources=table([shard.data_ptr() for shard in shards]),
            offsets=table(offsets),
            counts=table(counts),
            most=max(counts),
            even=vector if all(size % vector == 0 for size in (*counts, *offsets)) else 1,
            dtype=shards[0].dtype,
        )


def gather_many(*, shards: ShardList, out: torch.Tensor, block: int = 2048) -> None:
    """Copies every shard to its place in `out`, which is flat, of the shards' dtype and large enough for all.

    Two owners have a norm's weight [6] and a bias [4], which start in `out` at 0 and at 8: shards of 3, 3, 2 and 2
    elements go to the offsets 0, 3, 8 and 10; `out[6:8]` is unchanged. Raises ValueError for an `out` of another dtype
    or device, or with strides.
    """
    if out.dtype != shards.dtype or out.device != shards.sources.device or out.stride() != (1,):
        raise ValueError(
            f"out is {out.dtype} on {out.device} with strides {out.stride()}; give {shards.dtype} on "
            f"{shards.sources.device}, flat"
        )
    if shards.most:
        grid = (triton.cdiv(shards.most, block), len(shards.counts))
        gather_many_kernel[grid](
            shards.sources,
            shards.offsets,
            shards.counts,
            out,
            DTYPE=TL_DTYPES[shards.dtype],
            EVEN=shards.even,
            BLOCK=block,
        )


def gather_ref(shards: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The same in plain torch, over all owners' shards."""
    return join(shards).to(dtype)
