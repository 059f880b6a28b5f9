"""Additions that are held in their midst: no other process, and no other thread, adds to that shard meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from odc_triton.comm.layout import Region
from odc_triton.comm.memory.heap import ByteLocks, SharedMemoryHeap
from odc_triton.engine import transport as accumulate
from odc_triton.engine.transport import LockedTransport, Streams, Target
from odc_triton.nn.operand import add_rows
from tests.support import ranks
from tests.support.deadlines import LONG_S

Add = Callable[[], None]


class WatchedLock:
    """A lock that sets `tried` when it is asked for."""

    def __init__(self, tried: threading.Event) -> None:
        self._lock, self._tried = threading.Lock(), tried

    def __enter__(self) -> None:
        self._tried.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.fixture(params=["whole", "by segments"])
def place(request: pytest.FixtureRequest) -> tuple[SharedMemoryHeap, LockedTransport, torch.Tensor, Add]:
    """One rank's heap and accumulator, its shard, and what adds 1 to each element of it."""
    heap = SharedMemoryHeap(rank=0, world=1, size_bytes=4096, locks=1, token="unused", timeout_s=LONG_S)
    shard = heap.shard(Region(shape=(6, 2), dtype="float32", itemsize=4, offset_bytes=0), 0)
    adder = LockedTransport(heap, Streams(), LONG_S)
    target, told = Target(number=0, shards=[shard], rank=0), {"name": "w", "waited": lambda waits: None}

    def add() -> None:
        if request.param == "whole":
            adder.add(torch.ones(6, 2), target, **told)
        else:
            adder.sink(target, **told)(0, 0, torch.ones(6, 2))

    yield heap, adder, shard, add
    heap.close()


def _holder(file: str, index: int) -> int | None:
    return ByteLocks(os.open(file, os.O_RDWR)).holder_pid(index)


def test_the_owners_lock_is_held_while_rows_are_added(place: tuple) -> None:
    heap, _, shard, add = place
    holders = []

    def ask_from_another_process(*given: object) -> None:
        file = f"/proc/{os.getpid()}/fd/{heap._locks._fd}"
        holders.append(ranks.in_own_process(_holder, file, heap._lock_index(0, 0)))
        add_rows(*given)

    with mock.patch.object(accumulate, "add_rows", ask_from_another_process):
        add()
    assert holders == [os.getpid()]
    assert heap.try_lock(0, 0)
    assert shard.tolist() == [[1, 1]] * 6


def test_a_thread_waits_for_another_ones_addition(place: tuple) -> None:
    _, adder, shard, add = place
    adding, tried, goes_on, at_work = threading.Event(), threading.Event(), threading.Event(), []
    adder._threads[0] = WatchedLock(tried)

    def slowly(*given: object) -> None:
        at_work.append(threading.current_thread())
        (adding if len(at_work) == 1 else tried).set()
        goes_on.wait(LONG_S)
        add_rows(*given)

    threads = [threading.Thread(target=add), threading.Thread(target=add)]
    with mock.patch.object(accumulate, "add_rows", slowly):
        threads[0].start()
        assert adding.wait(LONG_S)
        tried.clear()
        threads[1].start()
        assert tried.wait(LONG_S)  # the second one has come to the lock, or past it
        meanwhile = list(at_work)
        goes_on.set()
        for thread in threads:
            thread.join(LONG_S)
    assert meanwhile == threads[:1]
    assert at_work == threads
    assert shard.tolist() == [[2, 2]] * 6


def test_rows_beyond_the_shard_are_refused() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        add_rows(torch.zeros(4, 2), 2, torch.ones(4, 2))


class _LockedFor:
    """A heap whose lock of each owner is held by another rank until so many seconds have passed; and the clock."""

    def __init__(self, *until_s: float) -> None:
        self.until_s, self.now_s, self.rank, self.first = until_s, 0.0, 0, 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _: float) -> None:
        self.now_s += 0.25

    def try_lock(self, number: int, owner: int) -> bool:
        return self.now_s >= self.until_s[owner]

    def unlock(self, number: int, owner: int) -> None: ...

    def lock_holder(self, number: int, owner: int) -> int:
        return 1


@pytest.mark.parametrize("by_segments", [False, True])
def test_waits_for_locks_are_reported_and_have_the_deadline_each(
    by_segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, waits = _LockedFor(0.75, 1.5), []
    monkeypatch.setattr(accumulate, "time", heap)
    shards = [torch.zeros(1, 2), torch.zeros(2, 2)]
    adder, target = LockedTransport(heap, Streams(), 1.0), Target(number=0, shards=shards, rank=0)
    if by_segments:
        add = adder.sink(target, name="w", waited=waits.extend)
        for owner, shard in enumerate(shards):
            add(owner, 0, torch.ones_like(shard))
    else:
        adder.add(torch.ones(3, 2), target, name="w", waited=waits.extend)
    assert waits == [(0.0, 0.75), (0.75, 1.5)]
    assert all(shard.eq(1).all() for shard in shards)
