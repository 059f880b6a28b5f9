"""The heap on GPUs: torch's symmetric memory for the shards, shared host memory for status and signs of life.

Status is on the host so that a rank can read them, and be seen, whatever its GPU is doing.
"""

from __future__ import annotations

import os
import warnings
import zlib

import torch
from torch.distributed import ProcessGroup

from ..layout import ALIGNMENT_BYTES, Region
from .heap import SharedMemoryHeap, SymmetricHeap
from .rendezvous import Look, look_at_nobody

_SOCKET_PATH_BYTES = 107  # Linux's limit, without the final zero
_HEADER_BYTES = ALIGNMENT_BYTES  # a mark that shows peers that they have mapped the right memory


class CudaHeap(SymmetricHeap):
    """`size_bytes` of zeroed memory on each rank's GPU, which all ranks of `group` read and add to.

    Collective: every rank calls it with the same sizes and `token`, with its own GPU as the current device.
    `shared_device`: several ranks use one GPU, or number theirs alike because each sees only its own: torch compares
    numbers, and needs an option that allows this. Raises DeadlineExceeded with the missing ranks if not all arrive
    within `timeout_s`, RuntimeError if the GPUs can't reach each other.
    """

    apart = True

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        size_bytes: int,
        token: str,
        timeout_s: float,
        group: ProcessGroup,
        shared_device: bool = False,
        look: Look = look_at_nobody,
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        check_socket_folder(os.environ.get("TMPDIR", "/tmp"))
        self.rank, self.world = rank, world
        self._group, self._shared_device = group, shared_device
        self.device = torch.device("cuda", torch.cuda.current_device())
        status = f"{token}-status"
        self._host = SharedMemoryHeap(rank=rank, world=world, token=status, timeout_s=timeout_s, look=look)
        if shared_device:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        # Nothing here is sent to all peers at once; setting up multicast is slow and takes slots of the switch.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        torch.cuda.empty_cache()  # symmetric memory can't use what the caching allocator keeps
        total_bytes = _HEADER_BYTES + max(size_bytes, 1)
        self._memory = _allocated(total_bytes, self.device, world)
        self._memory.zero_()
        self._memory[:8].view(torch.int64).fill_(_mark(token, rank))
        torch.cuda.synchronize(self.device)  # peers read the mark as soon as they have mapped this memory
        if world == 1:
            self._parts = [self._memory]
            return
        try:
            self._handle = symmetric_memory.rendezvous(self._memory, group)
            self._parts = [self._handle.get_buffer(peer, (total_bytes,), torch.uint8) for peer in range(world)]
            self._parts[rank] = self._memory
            marks = [int(part[:8].view(torch.int64).item()) for part in self._parts]
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} on {torch.cuda.get_device_name(self.device)} can't reach its peers' GPU memory: {error}. "
                f"All ranks must run on one host with one TMPDIR, on GPUs with peer access (`nvidia-smi topo -p2p r`)"
            ) from error
        wrong = [peer for peer, mark in enumerate(marks) if mark != _mark(token, peer)]
        if wrong:
            raise RuntimeError(f"rank {rank} has mapped memory of ranks {wrong} that is not this heap's")

    def another(self, *, size_bytes: int, locks: int, token: str, timeout_s: float) -> CudaHeap:
        heap = CudaHeap(
            rank=self.rank,
            world=self.world,
            size_bytes=size_bytes,
            token=token,
            timeout_s=timeout_s,
            group=self._group,
            shared_device=self._shared_device,
            look=self._look,
        )
        heap.first, heap.near = self.first, self.near
        return heap

    def shard(self, region: Region, owner: int) -> torch.Tensor:
        own = region.own_shard(self.world, owner)
        dtype = getattr(torch, own.dtype)
        if own.elements == 0:
            return torch.empty(own.shape, dtype=dtype, device=self.device)
        start = _HEADER_BYTES + own.offset_bytes
        return self._parts[owner].data[start : start + own.size_bytes].view(dtype).view(own.shape)

    def show(self, slot: int, value: int) -> None:
        self._host.show(slot, value)

    def seen(self, slot: int) -> list[int]:
        return self._host.seen(slot)

    def is_alive(self, rank: int) -> bool:
        return self._host.is_alive(rank)

    def close(self) -> None:
        """Says that this rank left. Tensors over the heap stay valid only as long as the heap is held."""
        self._host.close()


def _allocated(size_bytes: int, device: torch.device, world: int) -> torch.Tensor:
    """Memory that peers can map; for one rank, which has none, any, where the driver refuses that."""
    from torch._C._distributed_c10d import _SymmetricMemory

    try:
        # Not symmetric_memory.empty, which may use the caching allocator: the memory would then count as allocated and
        # stay mapped when it is freed, and ranks would synchronise once per segment instead of once per heap.
        return _SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, device)
    except RuntimeError as error:
        if world > 1 or "out of memory" in str(error):
            raise
        warnings.warn(f"one rank goes on without symmetric memory, more can't start here: {error}", stacklevel=2)
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def check_socket_folder(folder: str) -> None:
    """Raises RuntimeError if TMPDIR's path is too long for the sockets by which torch passes GPU memory."""
    path = os.path.join(folder, f"symm_mem-{2**22}")  # the largest process id that Linux allows
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise RuntimeError(
            f"TMPDIR is {folder!r}, and a socket below it, such as {path!r}, would have more than {_SOCKET_PATH_BYTES} "
            f"bytes: set TMPDIR to a shorter path, the same on all ranks, such as /tmp"
        )


def _mark(token: str, rank: int) -> int:
    return zlib.crc32(f"{token}/{rank}".encode())
