"""A peers' weight in a local buffer, which fills shard by shard while a kernel reads it (linear_staged.py).

[Note: epochs] A flag holds the number of the pull that set it, so no flag is ever reset: the next pull has the next
number. After 2^31 - 1 comes 1; a flag holds 0 before its first pull. Only a flag that goes unwritten for all of
2^31 - 1 pulls could be mistaken for a new one.

[Note: near and far] Rows that cross a link are fetched by a copy engine, which needs no multiprocessor: a kernel may
occupy them all and wait. A copy within one device is itself a kernel, which such a kernel could block forever. So the
kernel starts only after the rows of near owners: this rank's own, and those of ranks that share the device. If all
ranks share a device, that is all rows, and `staged` is pointless.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .peers import PeerShards, check_alike, check_matrix, rows_per_owner
from .streams import Device, device_of

_LAST_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeight:
    """A local buffer for a weight [N, K] of the peers, as of its `epoch`-th pull. Make it by `of`, and fill it by
    `pull`.

    buffer: [R n, K], owner o's rows from o n on, zeros after row N.
    flags: int32 [R], the pull whose rows of that owner have arrived.
    status: int32 [1], 0 or 1 + an owner whose rows did not reach a waiting kernel.
    epoch: the number of the last pull. A flag of an earlier one does not count, so no flag is ever reset.
    shape, rank, world: the weight's shape, this rank, and the number R of owners.
    on: the device whose `stream` makes the copies; None on a CPU.
    stream, read: the stream of the copies, and the event after the last kernel that reads the buffer.
    has_far: rows of the last pull arrive while the kernel runs.
    """

    buffer: torch.Tensor
    flags: torch.Tensor
    status: torch.Tensor
    epoch: int
    shape: tuple[int, int]
    rank: int
    world: int
    on: Device | None = None
    stream: Any = None
    read: Any = None
    has_far: bool = False

    @property
    def rows_per_owner(self) -> int:
        return rows_per_owner(self.shape[0], self.world)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @classmethod
    def of(cls, peers: PeerShards, *, on: Device | None = None) -> StagedWeight:
        """An empty buffer for weights like `peers` [N, K]. All kernels that read it must run on the current stream.

        on: a device to use instead of a GPU, to simulate one.

        Raises ValueError unless the weight has two dimensions.
        """
        check_matrix(peers)
        device, stream, read = peers.device, None, None
        buffer = torch.zeros(peers.world * peers.rows_per_owner, peers.shape[1], dtype=peers.dtype, device=device)
        flags = torch.zeros(peers.world, dtype=torch.int32, device=device)
        on = on or device_of(buffer)
        if on is not None:
            stream, read = on.stream(), on.current().record_event()
        if buffer.is_cuda:
            buffer.record_stream(stream)  # once, for when it is freed: `stream` works on it until then
            flags.record_stream(stream)
        return cls(
            buffer=buffer,
            flags=flags,
            status=torch.zeros(1, dtype=torch.int32, device=device),
            epoch=0,
            shape=peers.shape,
            rank=peers.rank,
            world=peers.world,
            on=on,
            stream=stream,
            read=read,
        )

    def is_read_now(self) -> None:
        """Call after launching a kernel that reads the buffer: the next pull waits for that kernel."""
        if self.on is not None:
            self.on.current().record_event(self.read)


def pull(*, peers: PeerShards, staged: StagedWeight) -> StagedWeight:
    """Fetches the shards of `peers` into the buffer of `staged`, own first.

    Rank 0 of two, which owns rows 0 and 1 of three, copies these into the buffer and sets its own flag; then it copies
    row 2 from rank 1 and sets rank 1's.

    On a GPU everything is enqueued when this returns. Rows of owners on the same device are there for all later work;
    those that cross a link arrive while the kernel waits for them. The copies wait only for the kernels that read the
    buffer before: the shards must be readable now. On the CPU everything has arrived when this returns.

    Returns the weight for `linear_staged` and `linear_dx_staged`. Raises ValueError if `peers` don't match the buffer.
    """
    check_alike("the sharded weight", peers, "buffer", staged, shape=staged.shape, dtype=staged.dtype)
    epoch = staged.epoch % _LAST_EPOCH + 1
    in_turn = [(staged.rank + index) % staged.world for index in range(staged.world)]
    crosses_a_link = set(peers.far)
    near = [owner for owner in in_turn if owner not in crosses_a_link]
    far = [owner for owner in in_turn if owner in crosses_a_link]
    if staged.on is None:
        _fetch(peers, staged, in_turn, epoch)
    else:
        staged.stream.wait_event(staged.read)
        staged.on.enqueue(staged.stream, partial(_fetch, peers, staged, near, epoch))
        near_come = staged.stream.record_event()
        staged.on.enqueue(staged.stream, partial(_fetch, peers, staged, far, epoch))
        staged.on.current().wait_event(near_come)
    return replace(staged, epoch=epoch, has_far=bool(far))


def _fetch(peers: PeerShards, staged: StagedWeight, owners: list[int], epoch: int) -> None:
    for owner in owners:
        first_row = owner * staged.rows_per_owner
        # Contiguous and of one dtype, so a plain copy.
        staged.buffer[first_row : first_row + peers.rows(owner)].copy_(peers.shards[owner], non_blocking=True)
        if staged.flags.is_cuda:
            torch.ops.symm_mem.stream_write_value32_(staged.flags.view(torch.uint32), owner, epoch)
        else:
            staged.flags[owner] = epoch


def check(staged: StagedWeight) -> None:
    """Waits for the device, and finds out whether all rows have reached the kernels that read `staged` since the last
    check.

    Raises TimeoutError if an owner's rows did not.
    """
    missed = int(staged.status.item())
    if missed:
        staged.status.zero_()
        raise TimeoutError(
            f"the rows of owner {missed - 1} of a weight {staged.shape} did not arrive at rank {staged.rank} in pull "
            f"{staged.epoch} (flags now: {staged.flags.tolist()}); results are NaN. Call `pull` before the kernel and "
            f"pass its result; on a slow link give more `spins`"
        )


_BUFFERS = 2  # of each shape: one is filled while a kernel reads the other


class Staging:
    """Two buffers for each shape, dtype and thread, taken in turns: memory does not grow with the number of layers.

    Autograd runs a backward in another thread than its forward, so there may be four. `device`: a simulated one for
    the copies.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self._rings: dict[tuple[tuple[int, ...], torch.dtype, int], list[StagedWeight]] = {}

    def pull(self, peers: PeerShards) -> StagedWeight:
        """Starts copying a weight [N, K] into the least recently used buffer; see `odc_kernels.staged.pull`."""
        ring = self._rings.setdefault((peers.shape, peers.dtype, threading.get_ident()), [])
        buffer = StagedWeight.of(peers, on=self._device) if len(ring) < _BUFFERS else ring.pop(0)
        pulled = pull(peers=peers, staged=buffer)
        ring.append(pulled)
        return pulled

    def check(self) -> None:
        """Raises TimeoutError if a shard did not reach a waiting kernel since the last check. Waits for the device."""
        for ring in self._rings.values():
            for buffer in ring:
                check(buffer)
