"""Device functions that the kernels share. The only file that deals with memory orders.

[Note: orders] A peer's shard is only read between the barriers that the engine holds on the host, so loads need no
order. Additions into a peer's gradient shard are `relaxed` at `sys` scope: they are atomic with those of other GPUs,
and the exit barrier, after the stream is drained, completes them for the owner. The default (`acq_rel`,
`gpu`) would be slow, and wrong for another GPU's memory.

[Note: bulk reductions] `descriptor.atomic_add` compiles to `cp.reduce.async.bulk`, one instruction for a tile instead
of one for every four numbers, with about as many registers. PTX gives it no scope: it is relaxed at `gpu` scope. Within
one GPU that is enough: all additions meet in its L2. Over NVLink it is right if they are done in the L2 of the memory's
home, as other additions are; the vendor does not promise it. So where an owner's memory is on another GPU,
`adds_in_bulk` is False unless ODC_BULK_REDUCTIONS=on; `off` disables bulk reductions everywhere. The default may change
when `python -m bench.suites.links --loops 50`, which adds both ways at once and compares, has passed on several GPUs.

[Note: exact sums] Where sums are exact, shards are int64, and trunc(value * factor) is added: integers have the same
sum in any order. Only this file knows how: a kernel takes `factor` and `largest` from `PeerShards.adding` and passes
them to `sum_address` and `summand`; for fp32 shards `largest` is None. Bulk reductions take uint64 but not int64, so
that is the type here; the bits of a sum are the same.

[Note: alignment] An address loaded from a table has no known alignment. Without the hint, 2-byte loads are not joined
into vectors and additions of 16-bit values become compare-and-swap loops. Hence `peer_address`, and shards aligned to
16 bytes (peers.py checks it).

[Note: arrival] The copy engine fills a local buffer while the kernel that reads it runs. A stream operation after each
copy makes the copy visible to the whole system, then writes its flag; so the kernel's read of the flag is an `acquire`
at `sys` scope (adding zero compiles to a plain load, `ld.acquire.sys`). One thread reads it, and the barrier after
which the others learn its value orders their loads too. TMA reads through another proxy, which an acquire does not
order: call `bulk_reads_follow` between the wait and the first TMA load.

[Note: flags of peers] `set_flag` is a `release` at `sys` scope in a kernel of its own: stream order puts earlier
kernels and copies before it, so a peer that acquires the flag sees what they wrote.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .peers import PeerShards
from .tiles import LinearTile, WgradTile, tile_of

TL_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def peer_address(table, owner, dtype: tl.constexpr):
    """Pointer to the first element of `owner`'s shard."""
    return tl.multiple_of(tl.load(table + owner).to(tl.pointer_type(dtype)), 16)


@triton.jit
def sum_address(table, owner, largest):
    """Pointer to the first element of `owner`'s gradient shard; see [Note: exact sums]."""
    return peer_address(table, owner, tl.float32 if largest is None else tl.uint64)


@triton.jit
def turn(index, rank, world):
    """The owner that `rank` visits in its `index`-th turn: ranks start after themselves, so at different owners."""
    return (rank + 1 + index) % world


@triton.jit
def add_to_peer(pointer, value, mask):
    """Adds a result of `summand` into a peer's gradient shard; see [Note: orders]."""
    tl.atomic_add(pointer, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def summand(value, factor, largest):
    """The summands of a block of fp32 values: see [Note: exact sums]. If all in the shard are finite, those outside of
    it must be 0.

    `largest`, int32, of this rank, becomes at least the bits of all |value|. Bits are ordered as the numbers are, with
    infinity and NaN above all.
    """
    if largest is not None:
        bits = tl.abs(value).to(tl.int32, bitcast=True)
        tl.atomic_max(largest, tl.max(bits), sem="relaxed", scope="gpu")
        scaled = value * factor
        fits = tl.abs(scaled) < 2.0**62  # False for NaN; larger values show in `largest`
        value = tl.where(fits, scaled, 0.0).to(tl.int64).to(tl.uint64, bitcast=True)
    return value


@triton.jit
def wait_for_shard(flags, status, owner, epoch, spins):
    """Waits until `owner`'s flag is `epoch`, polling at most `spins` times; see [Note: arrival].

    Returns True if it arrived. If not, `status` becomes owner + 1 and the caller must not use the buffer.
    """
    seen = tl.atomic_add(flags + owner, 0, sem="acquire", scope="sys")
    looks = 1
    while (seen != epoch) & (looks < spins):
        seen = tl.atomic_add(flags + owner, 0, sem="acquire", scope="sys")
        looks += 1
    if seen != epoch:
        tl.store(status, owner + 1)
    return seen == epoch


@triton.jit
def set_flag(flag, value):
    """Sets a peer's flag, int64; see [Note: flags of peers]."""
    tl.debug_barrier()  # triton 3.6 puts none before a scalar release
    tl.atomic_xchg(flag, value.to(tl.int64), sem="release", scope="sys")


@triton.jit
def wait_for_flag(flag, stop, value, spins):
    """Waits until a flag, int64, is at least `value`. Returns False if `stop` ends the wait, or after `spins` polls. A
    poll of `stop` crosses PCIe, so it is done with one poll of the flag in 64.
    """
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    halted = 0
    looks = 1
    while (seen < value) & (halted == 0) & (looks < spins):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        if looks % 64 == 1:
            halted = tl.atomic_add(stop, 0, sem="acquire", scope="sys")
        looks += 1
    return seen >= value


@triton.jit
def bulk_reads_follow():
    """Orders TMA loads after this thread's earlier acquires; see [Note: arrival]. Needs sm_90."""
    tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_block(matrix, width, i, i_in, j, j_in):
    """The rows `i` and columns `j` of a matrix with `width` columns; 0 where not both are in it."""
    return tl.load(matrix + i.to(tl.int64)[:, None] * width + j[None, :], mask=i_in[:, None] & j_in[None, :], other=0.0)


@triton.jit
def store_block(matrix, width, i, i_in, j, j_in, values):
    """Writes `values` there, in the matrix's dtype."""
    tl.store(
        matrix + i.to(tl.int64)[:, None] * width + j[None, :],
        values.to(matrix.dtype.element_ty),
        mask=i_in[:, None] & j_in[None, :],
    )


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a b, in fp32. `UPCAST` when interpreting: the interpreter stores bf16 as integers and multiplies those.

    fp32 operands are multiplied in fp32, not in tf32: a layer's result must not depend on which kernel made it.
    """
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def adds_in_bulk(shards: PeerShards) -> bool:
    """True if a kernel may add to these shards by bulk reductions; see [Note: bulk reductions].

    Raises ValueError if ODC_BULK_REDUCTIONS is not auto, on or off.
    """
    mode = os.environ.get("ODC_BULK_REDUCTIONS", "auto")
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"ODC_BULK_REDUCTIONS is {mode!r}; set it to auto, on or off")
    return mode == "on" or (mode == "auto" and not shards.far)


def makes_descriptors(launcher: Callable[..., None]) -> Callable[..., None]:
    """For launchers whose kernels make tensor descriptors. Triton allocates them by its allocator, a context variable:
    it is ours only within the launcher, so the user's is kept.
    """

    @functools.wraps(launcher)
    def launch(**operands: Any) -> None:
        context = contextvars.copy_context()
        context.run(triton.set_allocator, _descriptor_memory)
        context.run(launcher, **operands)

    return launch


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def interpreting() -> bool:
    """True if kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def architecture(device: torch.device) -> int:
    """90 for sm_90. When interpreting, that of the oldest supported chip: its tiles are the smallest."""
    if interpreting():
        return 80
    if device.type == "cpu":
        raise ValueError("on a CPU kernels run in Triton's interpreter only: set TRITON_INTERPRET=1 before its import")
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def default_tile(operator: str, value: torch.Tensor, *, tokens: int | None = None) -> Any:
    """The table's tile for an operand [T, ...]; `tokens`: T, if it is another one."""
    tokens = len(value) if tokens is None else tokens
    return tile_of(operator, element_bytes=value.element_size(), arch=architecture(value.device), tokens=tokens)


def tile_options(tile: LinearTile | WgradTile) -> dict[str, Any]:
    """What a launch of a matrix kernel takes of its tile, but for the group."""
    blocks = {"BLOCK_T": tile.t, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    return {"UPCAST": interpreting(), **blocks, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
