"""Symmetric memory, and the status that ranks show each other: the interface, and the heap of one host.

`SharedMemoryHeap` is a memfd, read without a copy: it has no name in any file system, so nothing is left however the
ranks end, and /dev/shm does not limit its size. Its mode is 0600 and its size is sealed. A parameter's shards are side
by side, so the whole tensor is contiguous: gathering costs nothing. `ApartHeap` has the layout of a GPU's heap instead:
each rank's shards in their own part.

[Note: traps of fcntl locks] They belong to a process, not to a thread or a descriptor: threads of one process
need a lock of their own on top, and closing *any* descriptor of the file drops all locks this process holds on
it, so the file is opened once and never duplicated. F_SETLKW has no timeout, hence LOCK_NB and a deadline in the
caller. Locks of open file descriptions (F_OFD_*) would survive in forked children, so they are not used.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from abc import ABC, abstractmethod
from multiprocessing.util import Finalize
from typing import Any

import torch

from ...base.errors import RankLost
from ..layout import Region, aligned
from .rendezvous import Look, look_at_nobody, receive_files, send_files

STATUS_SLOTS = 16  # of 8 bytes, per rank
PID, LEFT = range(2)  # the heap's own slots; LEFT is 1 after the rank closed its heap
_STATUS_BYTES = 8
_FLOCK = "hhxxxxqqixxxx"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class StatusBoard(ABC):
    """Integers that each rank shows its peers; only that rank writes them. 0 at first."""

    _used = LEFT + 1

    def new_slot(self) -> int:
        """A slot that nothing else uses. All ranks take theirs in the same order."""
        if self._used == STATUS_SLOTS:
            raise RuntimeError(f"all {STATUS_SLOTS} status slots of the heap are in use")
        self._used += 1
        return self._used - 1

    @abstractmethod
    def show(self, slot: int, value: int) -> None:
        """Sets this rank's integer."""

    @abstractmethod
    def seen(self, slot: int) -> list[int]:
        """That integer of every rank."""

    @abstractmethod
    def is_alive(self, rank: int) -> bool:
        """True while that rank's process exists and has the heap open."""


class Status:
    """One integer per rank on a board."""

    def __init__(self, board: StatusBoard) -> None:
        self._board, self.slot = board, board.new_slot()

    def show(self, value: int) -> None:
        self._board.show(self.slot, value)

    def seen(self) -> list[int]:
        """By rank."""
        return self._board.seen(self.slot)


class SymmetricHeap(StatusBoard):
    """Declared regions, allocated once, mapped on all ranks, freed when the last rank releases them.

    `shard(region, owner)` is one owner's rows. Two calls give tensors over the same memory with *separate* autograd
    version counters: adding to a gradient must not look like a change of a saved weight.
    """

    rank: int
    world: int
    first: int = 0
    """The number of its rank 0 in messages: not 0 if several replicas have a heap each."""
    near: frozenset[int] | None = None
    """The ranks whose shards are on this rank's own device; None: this rank alone."""
    device: torch.device
    apart: bool
    """Whether each rank's shards are in its own memory: whole tensors must be gathered. Else they are views."""

    @abstractmethod
    def another(self, *, size_bytes: int, locks: int, token: str, timeout_s: float) -> SymmetricHeap:
        """A second heap of the same ranks and kind. Collective; `token` and errors as the first one's, and RankLost."""

    def _look(self, ranks: list[int]) -> None:
        """Raises RankLost if one of `ranks`, which are to open another heap, is gone."""
        if gone := [rank for rank in ranks if not self.is_alive(rank)]:
            left = self.seen(LEFT)
            words = [f"rank {self.first + rank} {'left the training loop' if left[rank] else 'died'}" for rank in gone]
            raise RankLost(
                [self.first + rank for rank in gone],
                f"rank {self.first + self.rank} was waiting for another shared heap: {', '.join(words)}. Start again "
                f"from the last checkpoint.",
            )

    @abstractmethod
    def shard(self, region: Region, owner: int) -> torch.Tensor: ...

    @abstractmethod
    def close(self) -> None: ...


class ByteLocks:
    """Exclusive locks on single bytes of `fd`, by index, which the kernel releases when their holder dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def try_lock(self, index: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index, os.SEEK_SET)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def unlock(self, index: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, index, os.SEEK_SET)

    def holder_pid(self, index: int) -> int | None:
        """The *other* process that holds the byte; None if it is free or held by this process."""
        probe = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, probe))
        return None if kind == fcntl.F_UNLCK else pid

    def close(self) -> None:
        os.close(self._fd)


def _new_memfd(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _leave(status: memoryview, left: int, locks: ByteLocks, read_only: int) -> None:
    status[left] = 1
    locks.close()
    if read_only >= 0:
        os.close(read_only)


class SharedMemoryHeap(SymmetricHeap):
    """`size_bytes` of zeroed memory that `world` processes of one host share, and `locks` locks for each.

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
        size_bytes: int = 0,
        locks: int = 0,
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
            lock_fd = _new_memfd("odc-locks", world * (locks + 1))
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
            # Rank 0's, for processes outside of the job; -1 on other ranks.
            self.read_only_fd = os.open(f"/proc/self/fd/{data_fd}", os.O_RDONLY) if rank == 0 else -1
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

    def another(self, *, size_bytes: int, locks: int, token: str, timeout_s: float) -> SharedMemoryHeap:
        sizes = {"size_bytes": size_bytes, "locks": locks}
        heap = type(self)(rank=self.rank, world=self.world, token=token, timeout_s=timeout_s, look=self._look, **sizes)
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

    def _lock_index(self, number: int, owner: int) -> int:
        return self.world * (number + 1) + owner

    def try_lock(self, number: int, owner: int) -> bool:
        """Takes the accumulation lock of (parameter or layer `number`, `owner`) if it is free."""
        return self._locks.try_lock(self._lock_index(number, owner))

    def unlock(self, number: int, owner: int) -> None:
        self._locks.unlock(self._lock_index(number, owner))

    def lock_holder(self, number: int, owner: int) -> int | None:
        """The other rank that holds the lock now, if any."""
        pid = self._locks.holder_pid(self._lock_index(number, owner))
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
