"""Flags by which ranks signal their progress to each other: the device sets them and waits for them.

A flag is an int64 in the memory of the rank that waits for it. One other rank writes it, and it only grows. So a wait
is for "at least", nothing is ever reset, and a rank polls its own memory, never a link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import triton
import triton.language as tl

from .device import set_flag, wait_for_flag

_AT_ONCE = 16  # ranks of one launch, one bit each
_MOST_SPINS = 2**31 - 1


@triton.jit(do_not_specialize=["place", "value", "first", "ranks"])
def set_flags_kernel(table, place, value, first, ranks):
    bit = tl.program_id(0)
    if (ranks >> bit) & 1:
        flags = tl.load(table + first + bit).to(tl.pointer_type(tl.int64))
        set_flag(flags + place, value)


@triton.jit(do_not_specialize=["place", "stride", "value", "first", "ranks", "number", "spins"])
def await_flags_kernel(flags, stop, status, place, stride, value, first, ranks, number, spins):
    bit = tl.program_id(0)
    if (ranks >> bit) & 1:
        flag = flags + (first + bit).to(tl.int64) * stride + place
        if not wait_for_flag(flag, stop, value, spins) and tl.load(status) == 0:
            tl.store(status, number)


def set_flags(*, table: torch.Tensor, ranks: Iterable[int], place: int, value: int) -> None:
    """Sets flag `place` of each of `ranks` to `value`, after all earlier work of this stream, which peers then see.

    `table`: int64 [R], the addresses of the ranks' flags, int64, as this device sees them. Rank 0 of two has published
    layer 3 in wave 7: it sets `place` 3 of rank 1 to 7.
    """
    for first, mask in _masks(ranks):
        set_flags_kernel[(_AT_ONCE,)](table, place, value, first, mask, num_warps=1)


def await_flags(
    *,
    flags: torch.Tensor,
    ranks: Iterable[int],
    place: int,
    value: int,
    stop: torch.Tensor,
    status: torch.Tensor,
    number: int,
    spins: int,
) -> None:
    """Makes this stream wait until flag `place` of each of `ranks` is at least `value`; the host does not wait.

    `flags`: int64 [R, places], this rank's: row r is written by rank r. `stop`: int32 [1], best in pinned host memory;
    once it is not 0 all waits end. `status`: int32 [1], 0 until a wait fails, because of `stop` or after `spins` polls
    of a flag, then its `number`; results of later work on the stream must not be used.
    """
    spins = min(spins, _MOST_SPINS)
    for first, mask in _masks(ranks):
        await_flags_kernel[(_AT_ONCE,)](
            flags, stop, status, place, flags.shape[1], value, first, mask, number, spins, num_warps=1
        )


def _masks(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(the first of some ranks, a bit for each of them that is in `ranks`)."""
    masks: dict[int, int] = {}
    for rank in ranks:
        masks[rank // _AT_ONCE] = masks.get(rank // _AT_ONCE, 0) | 1 << rank % _AT_ONCE
    for group, mask in masks.items():
        yield group * _AT_ONCE, mask
