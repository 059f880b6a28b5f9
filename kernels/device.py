"""Device functions that the kernels share. The only file that knows memory orders.

[Note: orders] A peer's shard is only read between the meetings that the engine holds on the host, so loads need no
order. Additions into a peer's gradient shard are `relaxed` at `sys` scope: they are atomic with those of other GPUs,
and the exit meeting, after the stream is drained, is what tells the owner that they have landed. The default
(`acq_rel`, `gpu`) would be slow, and wrong for another GPU's memory.

[Note: alignment] An address loaded from a table has no known alignment. Without the hint, 2-byte loads are not joined
into vectors and additions of 16-bit values become compare-and-swap loops. Hence `peer_address`, and shards that are
aligned to 16 bytes (peers.py checks it).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
def turn(index, rank, world):
    """The owner that `rank` comes to in its `index`-th turn: each begins behind itself, so at different owners."""
    return (rank + 1 + index) % world


@triton.jit
def add_to_peer(pointer, value, mask):
    """Adds fp32 values into a peer's gradient shard; see [Note: orders]."""
    tl.atomic_add(pointer, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a b, in fp32. `UPCAST` when interpreting: the interpreter holds bf16 as integers and multiplies those.

    fp32 operands are multiplied in fp32, not in tf32: a layer's result must not depend on which kernel made it.
    """
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)
