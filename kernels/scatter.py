"""Adds a local gradient into its owners' shards, or rows of numbers into one peer's memory.

    shard_o[i, :] += scale * g[o n + i, :]        in fp32 or exactly (device.py), atomically

N rows in all, n = ceil(N / R) per owner, K elements a row; R owners. One program adds BLOCK consecutive elements of
one owner. A rank adds to the next rank's shard first and to its own last, so ranks add to different owners at any one
time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import add_to_peer, sum_address, summand, turn
from .peers import COMPUTE_DTYPES, PeerShards, check_sums, check_tensor


@triton.jit(do_not_specialize=["rows", "rank"])
def scatter_kernel(
    table,
    gradient,
    scale,
    rows,
    rows_per_owner,
    row_elements,
    rank,
    world,
    factor,
    largest,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner = turn(tl.program_id(1), rank, world)
    first_row = owner.to(tl.int64) * rows_per_owner
    count = tl.minimum(tl.maximum(rows - first_row, 0), rows_per_owner) * row_elements
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < count:
        target = sum_address(table, owner, largest)
        base = first_row * row_elements
        if ALIGNED:
            base = tl.multiple_of(base, 16)
        source = gradient + base
        offsets = start + tl.arange(0, BLOCK)
        if start + BLOCK <= count:  # without a mask, so that loads stay vectors
            value = tl.load(source + offsets).to(tl.float32) * scale
            add_to_peer(target + offsets, summand(value, factor, largest), None)
        else:
            mask = offsets < count
            value = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32) * scale
            add_to_peer(target + offsets, summand(value, factor, largest), mask)


def scatter(*, gradient: torch.Tensor, peers: PeerShards, scale: float = 1.0, block: int = 2048) -> None:
    """Adds scale * `gradient` [N, ...], in bf16, fp16 or fp32, into the shards of `peers`.

    Two ranks own two rows and one of N = 3. Rank 0 adds [[1], [2], [3]] and rank 1 [[10], [20], [30]]. In any order of
    the additions, the shards grow by [[11], [22]] and [[33]].

    Other ranks may add to the same shards at the same time. The addition is complete when this rank's stream is
    drained.

    block: elements that a program adds.

    Raises ValueError for another shape, device, dtype or layout.
    """
    check_tensor("gradient", gradient, shape=peers.shape, dtype=COMPUTE_DTYPES, device=peers.device)
    check_sums(peers)
    elements = peers.rows_per_owner * peers.row_elements
    if elements == 0:
        return
    scatter_kernel[(triton.cdiv(elements, block), peers.world)](
        peers.table,
        gradient,
        scale,
        *peers.layout,
        *peers.adding,
        ALIGNED=elements % 16 == 0,
        BLOCK=block,
    )


@triton.jit
def add_block_kernel(target, source, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    add_to_peer(target + offsets, tl.load(source + offsets, mask=mask).to(target.dtype.element_ty), mask)


def add_block(*, target: torch.Tensor, source: torch.Tensor, block: int = 2048) -> None:
    """target += source, atomically. `target`: contiguous, fp32, maybe a peer's; `source`: as many numbers, contiguous.
    Or both are int64, as exact sums are.

    Other ranks may add to the same numbers at the same time. The addition is complete when this rank's stream is
    drained, or when a peer sees a flag that this stream set after it. Raises ValueError for another size, dtype or
    layout.
    """
    if target.numel() != source.numel() or not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError(
            f"target is {tuple(target.shape)} with strides {target.stride()}, source {tuple(source.shape)} with "
            f"{source.stride()}; give contiguous ones of the same size"
        )
    if target.dtype == source.dtype == torch.int64:  # see [Note: exact sums]
        target, source = target.view(torch.uint64), source.view(torch.uint64)
    elif target.dtype != torch.float32:
        raise ValueError(f"target is {target.dtype}; gradients are summed in float32")
    if target.numel():
        grid = (triton.cdiv(target.numel(), block),)
        add_block_kernel[grid](target, source, target.numel(), BLOCK=block)


def scatter_ref(shards: list[torch.Tensor], gradient: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """The same in plain torch, over all owners' shards: their final values."""
    parts = gradient.split([len(shard) for shard in shards])
    return [shard + scale * part.float() for shard, part in zip(shards, parts, strict=True)]
