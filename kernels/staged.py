"""A weight of the peers in a local buffer, which fills shard by shard while a kernel reads it (linear_staged.py).

[Note: epochs] A flag holds the number of the pull that set it, so no flag is ever reset: the next pull has the next
number. After 2^31 - 1 comes 1; 0 is what a flag holds before its first pull. Only a flag that goes unwritten for all
of 2^31 - 1 pulls could be taken for a new one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from .peers import PeerShards, check_alike

_LAST_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeight:
    """A local buffer for a weight [N, K] of the peers, as of its `epoch`-th pull; see [Note: epochs].

    `buffer`: [R n, K], owner o's rows from o n on, zeros behind row N. `flags`: int32 [R], the pull whose rows of that
    owner have arrived. `status`: int32 [1], 0 or 1 + an owner whose rows a kernel waited for in vain. On CUDA,
    `stream` makes the copies and `read` is the event behind the last kernel that reads the buffer; None on the CPU.
    """

    buffer: torch.Tensor
    flags: torch.Tensor
    status: torch.Tensor
    epoch: int
    shape: tuple[int, int]
    rank: int
    world: int
    stream: torch.cuda.Stream | None = None
    read: torch.cuda.Event | None = None

    @property
    def rows_per_owner(self) -> int:
        return -(-self.shape[0] // self.world)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @classmethod
    def of(cls, peers: PeerShards, *, stream: torch.cuda.Stream | None = None) -> StagedWeight:
        """An empty buffer for weights like `peers` [N, K]; `stream`: where its copies are made (default: a new one).

        All kernels that read it run on the stream that is current now. Raises ValueError unless the weight has two
        dimensions.
        """
        if len(peers.shape) != 2:
            raise ValueError(f"the weight is {peers.shape}; give two dimensions [N, K]")
        device, read = peers.device, None
        buffer = torch.zeros(peers.world * peers.rows_per_owner, peers.shape[1], dtype=peers.dtype, device=device)
        flags = torch.zeros(peers.world, dtype=torch.int32, device=device)
        if device.type == "cuda":
            stream = stream or torch.cuda.Stream(device)
            buffer.record_stream(stream)  # once in its life, for when it is freed: `stream` works on it until then
            flags.record_stream(stream)
            read = torch.cuda.Event()
            read.record()
        return cls(
            buffer=buffer,
            flags=flags,
            status=torch.zeros(1, dtype=torch.int32, device=device),
            epoch=0,
            shape=peers.shape,
            rank=peers.rank,
            world=peers.world,
            stream=stream,
            read=read,
        )


def pull(*, peers: PeerShards, staged: StagedWeight) -> StagedWeight:
    """Fetches the shards of `peers` into the buffer of `staged`, own first; returns the weight that a kernel waits for.

    On CUDA everything is enqueued when this returns, so a kernel launched afterwards can wait for it without starving
    it. The copies wait for the kernels that read the buffer before, and for nothing else: the shards must be readable
    now. On the CPU everything has arrived when this returns. Raises ValueError when `peers` don't fit the buffer.
    """
    check_alike("the sharded weight", peers, "buffer", staged, shape=staged.shape, dtype=staged.dtype)
    epoch = staged.epoch % _LAST_EPOCH + 1
    if staged.stream is not None:
        staged.stream.wait_event(staged.read)
    with nullcontext() if staged.stream is None else torch.cuda.stream(staged.stream):
        for index in range(staged.world):
            owner = (staged.rank + index) % staged.world
            first_row = owner * staged.rows_per_owner
            # Contiguous and of one dtype, hence a plain copy that needs no multiprocessor.
            staged.buffer[first_row : first_row + peers.rows(owner)].copy_(peers.shards[owner], non_blocking=True)
            if staged.stream is None:
                staged.flags[owner] = epoch
            else:
                torch.ops.symm_mem.stream_write_value32_(staged.flags.view(torch.uint32), owner, epoch)
    return replace(staged, epoch=epoch)


def check(staged: StagedWeight) -> None:
    """Raises TimeoutError if a kernel waited in vain for an owner's rows since the last check. Synchronises."""
    missed = int(staged.status.item())
    if missed:
        staged.status.zero_()
        raise TimeoutError(
            f"the rows of owner {missed - 1} of a weight {staged.shape} did not arrive at rank {staged.rank} in pull "
            f"{staged.epoch} (flags now: {staged.flags.tolist()}); results are NaN. Call `pull` before the kernel and "
            f"pass on what it returns; on a slow link give more `spins`"
        )
