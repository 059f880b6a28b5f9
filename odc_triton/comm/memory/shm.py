"""The heap of machines without a GPU: one anonymous shared mapping per job, read without a copy.

The mapping is a memfd: it has no name in any file system, so nothing is left however the ranks end, and /dev/shm does
not limit its size. Its mode is 0600 and its size is sealed. A parameter's shards are side by side, so `whole` is one
contiguous tensor: gathering costs nothing. `ApartHeap` has the layout of a GPU's heap instead: each rank's shards in
their own part.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from multiprocessing.util import Finalize
from typing import Any

import torch

from ..layout import Region, aligned
from .heap import LEFT, PID, STATUS_SLOTS, SymmetricHeap
from .locks import ByteLocks
from .rendezvous import Look, look_at_nobody, receive_files, send_files

_STATUS_BYTES = 8


def _new_memfd(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _leave(status: memoryview, left: int, locks: ByteLocks, read_only: int | None) -> None:
    status[left] = 1
    locks.close()
    if read_only is not None:
        os.close(read_only)


class SharedMemoryHeap(SymmetricHeap):
    """`size_bytes` of zeroed memory that `world` processes of one host share, and `slots` × `world` locks.

    Collective: every rank calls it with the same sizes and `token`, a name that only this job knows. Raises
    DeadlineExceeded with the missing ranks if not all arrive within `timeout_s`, and what `look` raises meanwhile.
    """

    device = torch.device("cpu")
    apart = False

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        size_bytes: int,
        slots: int,
        token: str,
        timeout_s: float,
        look: Look = look_at_nobody,
    ) -> None:
        self.rank, self.world = rank, world
        header = world * STATUS_SLOTS * _STATUS_BYTES
        self._data_offset = aligned(header, mmap.PAGESIZE)
        self.size_bytes = self._data_offset + max(size_bytes, 1)
        if rank == 0:
            data_fd = _new_memfd("odc-heap", self.size_bytes)
            lock_fd = _new_memfd("odc-locks", world * (slots + 1))
            try:
                if world > 1:
                    send_files([data_fd, lock_fd], token=token, world=world, timeout_s=timeout_s, look=look)
            except BaseException:
                os.close(data_fd)
                os.close(lock_fd)
                raise
        else:
            data_fd, lock_fd = receive_files(2, token=token, rank=rank, timeout_s=timeout_s, look=look)
        try:
            self._map = mmap.mmap(data_fd, self.size_bytes)
            # Rank 0's, for processes outside of the job.
            self.read_only_fd = os.open(f"/proc/self/fd/{data_fd}", os.O_RDONLY) if rank == 0 else None
        finally:
            os.close(data_fd)
        self._locks = ByteLocks(lock_fd)
        self._status = memoryview(self._map)[:header].cast("q")
        # The process holds byte `rank` of the lock file for as long as it lives: peers can ask the kernel.
        if not self._locks.try_lock(rank):
            raise RuntimeError(f"another process is rank {rank} of this heap already")
        self.show(PID, os.getpid())
        # When this object is collected, and at the end of a script or of a multiprocessing child; never in a forked
        # child (a data loader's worker), which ends without its rank leaving.
        left = rank * STATUS_SLOTS + LEFT
        self._close = Finalize(self, _leave, (self._status, left, self._locks, self.read_only_fd), exitpriority=0)

    def another(self, *, size_bytes: int, slots: int, token: str, timeout_s: float) -> SharedMemoryHeap:
        sizes = {"size_bytes": size_bytes, "slots": slots}
        heap = type(self)(rank=self.rank, world=self.world, token=token, timeout_s=timeout_s, **sizes)
        heap.first, heap.near = self.first, self.near
        return heap

    def _tensor(self, region: Region, part: int = 0) -> torch.Tensor:
        """`part`: the byte that the region's offset counts from."""
        dtype = getattr(torch, region.dtype)
        if region.elements == 0:
            return torch.empty(region.shape, dtype=dtype)
        offset = self._data_offset + part + region.offset_bytes
        flat = torch.frombuffer(self._map, dtype=dtype, count=region.elements, offset=offset)
        return flat.view(region.shape)

    def offset_of(self, shard: torch.Tensor) -> int:
        """The byte of the file at which this tensor begins."""
        return shard.data_ptr() - torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def whole(self, region: Region) -> torch.Tensor:
        """The tensor that all owners' shards form together."""
        return self._tensor(region)

    def shard(self, region: Region, owner: int) -> torch.Tensor:
        return self._tensor(region.shard(self.world, owner))

    def show(self, slot: int, value: int) -> None:
        self._status[self.rank * STATUS_SLOTS + slot] = value

    def seen(self, slot: int) -> list[int]:
        return self._status[slot::STATUS_SLOTS].tolist()

    def is_alive(self, rank: int) -> bool:
        return rank == self.rank or self._locks.holder_pid(rank) is not None

    def _lock_index(self, slot: int, owner: int) -> int:
        return self.world * (slot + 1) + owner

    def try_lock(self, slot: int, owner: int) -> bool:
        """Takes the accumulation lock of (parameter `slot`, `owner`) if it is free."""
        return self._locks.try_lock(self._lock_index(slot, owner))

    def unlock(self, slot: int, owner: int) -> None:
        self._locks.unlock(self._lock_index(slot, owner))

    def lock_holder(self, slot: int, owner: int) -> int | None:
        """The other rank that holds the lock now, if any."""
        pid = self._locks.holder_pid(self._lock_index(slot, owner))
        pids = self.seen(PID)
        return pids.index(pid) if pid in pids else None

    def close(self) -> None:
        """Says that this rank left, and releases its locks. Tensors over the heap stay valid until dropped."""
        self._close()


class ApartHeap(SharedMemoryHeap):
    """For tests, and to find faults without a GPU: gathers and frees whole tensors as on CUDA.

    `size_bytes`: of one rank's part. Locks, status and errors as in `SharedMemoryHeap`.
    """

    apart = True

    def __init__(self, *, world: int, size_bytes: int, **options: Any) -> None:
        self._part_bytes = aligned(size_bytes)
        super().__init__(world=world, size_bytes=world * self._part_bytes, **options)

    def whole(self, region: Region) -> torch.Tensor:
        raise NotImplementedError("the shards are in separate memory: gather them")

    def shard(self, region: Region, owner: int) -> torch.Tensor:
        own = region.own_shard(self.world, owner)
        return self._tensor(own, part=owner * self._part_bytes)
