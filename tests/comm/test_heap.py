"""The shared heap: who may open it, what its tensors share, and locks that outlive no holder."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from odc_triton.base.errors import DeadlineExceeded
from odc_triton.comm.layout import Region
from odc_triton.comm.memory.cuda import _allocated, check_socket_folder
from odc_triton.comm.memory.heap import LEFT, PID, STATUS_SLOTS, ByteLocks, SharedMemoryHeap, _new_memfd
from odc_triton.comm.memory.rendezvous import receive_files, send_files
from tests.support import leftovers, ranks
from tests.support.deadlines import LONG_S, SHORT_S, until
from tests.support.forks import exit_of_child, fork

SOON = timedelta(seconds=LONG_S)


def _heap(rank: int, world: int, size_bytes: int = 4096, locks: int = 1) -> SharedMemoryHeap:
    return SharedMemoryHeap(
        rank=rank, world=world, size_bytes=size_bytes, locks=locks, token=f"test-{os.getppid()}", timeout_s=LONG_S
    )


def _region(*shape: int, offset_bytes: int = 0) -> Region:
    return Region(shape=shape, dtype="float32", itemsize=4, offset_bytes=offset_bytes)


def test_memfd_is_private_and_of_fixed_size() -> None:
    before = leftovers.names()
    fd = _new_memfd("odc-test", 4096)
    try:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert not os.get_inheritable(fd)
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        leftovers.assert_none_since(before)
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:odc-test")
    finally:
        os.close(fd)


def test_views_share_memory_but_not_versions() -> None:
    heap = _heap(0, 1)
    region = _region(6, 2)
    whole, shard = heap.whole(region), heap.shard(region, 0)
    assert whole.data_ptr() == shard.data_ptr()
    assert whole.data_ptr() % 64 == 0
    before = whole._version
    shard.add_(1)
    assert whole._version == before
    assert whole.tolist() == [[1, 1]] * 6
    heap.close()
    assert whole.sum() == 12  # tensors outlive the heap


def test_more_than_dev_shm() -> None:
    """The size is not bound by /dev/shm: pages exist once they are touched."""
    free = os.statvfs("/dev/shm")
    size = free.f_frsize * free.f_blocks + 2**30
    heap = _heap(0, 1, size_bytes=size)
    last = heap.whole(_region(4, offset_bytes=size - 16))
    last.fill_(1)
    assert last.sum() == 4
    heap.close()


def _turned_away(token: str) -> int:
    """The exit status of another user's process that asks for the heap's files until it is turned away: 0."""
    stranger = fork()
    if stranger == 0:
        os.setuid(65534)
        deadline_s = time.monotonic() + LONG_S
        while time.monotonic() < deadline_s:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(f"\0odc-{token}")
                    connection.sendall(b"\1\0\0\0")
                    _, fds, _, _ = socket.recv_fds(connection, 1, 2)
                    os._exit(1 if fds else 0)  # turned away: end of file, nothing received
                except ConnectionRefusedError:
                    time.sleep(0.01)
                except OSError:
                    os._exit(0)
        os._exit(2)
    with open("/dev/null") as file, pytest.raises(DeadlineExceeded, match=r"ranks \[1\]"):
        send_files([file.fileno()], token=token, world=2, timeout_s=SHORT_S)
    return os.waitstatus_to_exitcode(os.waitpid(stranger, 0)[1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_turned_away() -> None:
    assert ranks.in_own_process(_turned_away, f"uid-{os.getpid()}") == 0


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    until(lambda: connection.connect_ex(address) == 0)
    return connection


def test_rendezvous_names_who_is_missing() -> None:
    token = f"missing-{os.getpid()}"
    with pytest.raises(DeadlineExceeded, match="waited 0 s for rank 0 to offer"):
        receive_files(2, token=token, rank=1, timeout_s=0.1)
    received = []

    def come_after_a_silent_client() -> None:
        with _connected(f"\0odc-{token}"):
            received.extend(receive_files(1, token=token, rank=2, timeout_s=LONG_S))

    with open("/dev/null") as file:
        peer = threading.Thread(target=come_after_a_silent_client)
        peer.start()
        with pytest.raises(DeadlineExceeded) as caught:
            send_files([file.fileno()], token=token, world=4, timeout_s=2 * SHORT_S)
        peer.join()
    assert caught.value.ranks == [1, 3]
    assert not os.get_inheritable(received[0])
    os.close(received[0])
    assert token not in Path("/proc/net/unix").read_text()


def _locks_of_one_process() -> None:
    locks = ByteLocks(_new_memfd("odc-test-locks", 4))
    assert locks.try_lock(1)
    assert locks.holder_pid(1) is None  # one's own locks don't count
    assert exit_of_child(lambda: locks.try_lock(1) * 2 + locks.try_lock(2)) == 1  # they are not inherited
    locks.unlock(1)
    assert locks.try_lock(1)


def test_locks_of_one_process() -> None:
    ranks.in_own_process(_locks_of_one_process)


def _killed_holder(rank: int, world: int) -> tuple:
    heap = _heap(rank, world)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        assert heap.try_lock(0, 0)
        store.set("held", "1")
        time.sleep(LONG_S)
    store.wait(["held"], SOON)
    before = (heap.try_lock(0, 0), heap.lock_holder(0, 0), heap.is_alive(1))
    os.kill(heap.seen(PID)[1], signal.SIGKILL)
    until(lambda: heap.try_lock(0, 0))
    return before, (heap.lock_holder(0, 0), heap.is_alive(1), heap.seen(LEFT))


def test_kill_releases_locks() -> None:
    with ranks.start(_killed_holder, 2) as job:
        first, second = job.join()
    assert first.error is None, first.error
    before, after = first.value
    assert before == (False, 1, True)
    assert after == (None, False, [0, 0])
    assert second.signal == signal.SIGKILL


def _dies_before_another(rank: int, world: int, order: tuple[int, int]) -> None:
    heap = _heap(rank, world)
    heap.first = 2
    dist.barrier()
    if rank == order[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    heap.another(size_bytes=64, locks=1, token=f"another-{os.getppid()}", timeout_s=LONG_S)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_dies_before_another_heap_is_named(order: tuple[int, int]) -> None:
    """Rank 0 waits for its peer, and a peer for rank 0: long before the deadline."""
    with ranks.start(_dies_before_another, 2, order) as job:
        (alive,) = job.wait_for([order[0]])
    number, dead = (2 + each for each in order)
    wanted = rf"RankLost: rank {number} was waiting for another shared heap: rank {dead} died"
    assert re.search(wanted, alive.error), alive.error


def _forked() -> tuple[list[int], bool]:
    """A data loader's worker ends: its rank, 1, has not left."""
    token, own = f"forked-{os.getpid()}", {"world": 2, "size_bytes": 64, "locks": 1, "timeout_s": LONG_S}
    worker_ended, seen_by_rank_0 = LEFT + 1, LEFT + 2

    def rank_1() -> int:
        heap = SharedMemoryHeap(rank=1, token=token, **own)
        status = exit_of_child(lambda: heap.close() or 0)
        heap.show(worker_ended, 1)
        until(lambda: heap.seen(seen_by_rank_0)[0])
        return status

    peer = fork()
    if peer == 0:
        os._exit(rank_1())
    heap = SharedMemoryHeap(rank=0, token=token, **own)
    until(lambda: heap.seen(worker_ended)[1])
    seen = heap.seen(LEFT), heap.is_alive(1)
    heap.show(seen_by_rank_0, 1)
    assert os.waitstatus_to_exitcode(os.waitpid(peer, 0)[1]) == 0
    return seen


def test_a_folder_too_long_for_sockets() -> None:
    check_socket_folder("/tmp")
    check_socket_folder("/" + "a" * 89)
    with pytest.raises(RuntimeError, match=r"TMPDIR is '/a+', .* more than 107 bytes: set TMPDIR to a shorter path"):
        check_socket_folder("/" + "a" * 90)


def test_one_rank_needs_no_symmetric_memory() -> None:
    """Torch has it for GPUs alone; some virtual machines refuse it there."""
    with pytest.warns(UserWarning, match="one rank goes on without symmetric memory, more can't start here: Symmetric"):
        memory = _allocated(256, torch.device("cpu"), world=1)
    assert (memory.shape, memory.dtype) == ((256,), torch.uint8)
    with pytest.raises(RuntimeError, match="SymmetricMemory"):
        _allocated(256, torch.device("cpu"), world=2)


def test_there_are_so_many_statuses() -> None:
    heap = _heap(0, 1)
    assert [heap.new_slot() for _ in range(STATUS_SLOTS - LEFT - 1)] == list(range(LEFT + 1, STATUS_SLOTS))
    with pytest.raises(RuntimeError, match=f"all {STATUS_SLOTS} status slots of the heap are in use"):
        heap.new_slot()


def test_another_heap_names_ranks_alike() -> None:
    heap = _heap(0, 1)
    heap.first, heap.near = 4, frozenset({0})
    other = heap.another(size_bytes=64, locks=1, token="unused", timeout_s=LONG_S)
    assert (other.first, other.near) == (4, frozenset({0}))


def test_a_forked_process_that_ends_has_not_left() -> None:
    assert ranks.in_own_process(_forked) == ([0, 0], True)
