"""A counter in the process group's store, for the work queue, and a log of all ranks; every request has a deadline."""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from ..base.deadlines import Timeout, timedelta_of
from ..base.errors import DeadlineExceeded


class StoreCounter:
    """Atomic numbers in `store`, a connection that nothing else uses. For any thread.

    A store whose host is stopped, not dead, does not answer, and torch's `add` has no deadline. So a dedicated thread
    sends requests over a dedicated connection, where it may block forever. The thread is kept: on a busy machine a new
    thread for each request would take many times longer to start than the store to answer.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._is_lost = False
        self._lock = threading.Lock()
        self._questions: SimpleQueue[tuple | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_ask, args=(store, self._questions, self._answers), daemon=True).start()
        weakref.finalize(self, self._questions.put, None)

    def add(self, key: str, amount: int) -> int:
        """The new number under `key`. Raises DeadlineExceeded, and DistNetworkError when the store's host is gone."""
        return self.ask("add", key, amount)

    def ask(self, method: str, *given: Any) -> Any:
        """What that method of the store returns. Raises as `add`."""
        with self._lock:
            if not self._is_lost:
                self._is_lost = True  # until it has answered: a late answer would be taken for the next request's
                self._questions.put((method, *given))
                try:
                    answer = self._answers.get(timeout=self._timeout_s)
                except Empty:
                    pass
                else:
                    self._is_lost = False
                    if isinstance(answer, BaseException):
                        raise answer
                    return answer
        raise DeadlineExceeded(
            [],
            f"the store did not answer within {self._timeout_s:.1f} s ({method} {given[0]!r}): its host (rank 0, or "
            f"the launcher) is stopped or unreachable",
        )

    def delete_key(self, key: str) -> bool:
        return self.ask("delete_key", key)


class Log:
    """Messages of all ranks, which each of them reads in the same order. Messages are JSON.

    `store`: that of the ranks; None for a single one. Any thread may write, one reads.
    """

    def __init__(self, store: StoreCounter | None, key: str) -> None:
        self._store, self._key = store, key
        self._own: list[int] = []  # of this rank's messages, their places
        self._messages: list[str] = []  # without a store
        self._read = 0

    def write(self, message: Any) -> None:
        """Raises as `StoreCounter.add`."""
        text = json.dumps(message)
        if self._store is None:
            self._messages.append(text)
            return
        place = self._store.add(self._key, 1) - 1
        self._own.append(place)
        self._store.ask("set", f"{self._key}/{place}", text)

    def read(self) -> Iterator[Any]:
        """The messages that are new to this rank. Does not wait."""
        while texts := self._new():
            for text in texts:
                self._read += 1
                yield json.loads(text)

    def _new(self) -> Sequence[str | bytes]:
        if self._store is None:
            return self._messages[self._read :]
        keys = [f"{self._key}/{place}" for place in range(self._read, self._store.add(self._key, 0))]
        if keys and not self._store.ask("check", keys):  # some have a place and no text yet
            keys = keys[: self._store.ask("check", keys[:1])]
        return self._store.ask("multi_get", keys) if keys else []

    @property
    def is_behind(self) -> bool:
        """A message of this rank can't be read yet: one before it has its place, and another rank has not set it."""
        return max(self._own, default=-1) >= self._read

    def clear(self) -> None:
        """Deletes what this rank has written, once all ranks have read it."""
        for place in self._own:
            self._store.delete_key(f"{self._key}/{place}")
        if 0 in self._own:
            self._store.delete_key(self._key)


def _ask(store: dist.Store, questions: SimpleQueue, answers: SimpleQueue) -> None:
    """Holds no reference to the StoreCounter, so that the thread ends when the counter is freed."""
    while (question := questions.get()) is not None:
        try:
            method, *given = question
            answers.put(getattr(store, method)(*given))
        except BaseException as error:
            answers.put(error)


def store_counter(group: dist.ProcessGroup | None = None, timeout: Timeout = timedelta(minutes=30)) -> StoreCounter:
    """A counter that the ranks of `group` (default: all) share; each call makes a separate one.

    Every rank of the group calls it equally often and in the same order; it does not block. `timeout`: of one request,
    a timedelta or seconds. Raises RuntimeError if there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "a work queue of several ranks needs the process group's store: call "
            "torch.distributed.init_process_group first, or give the sampler a counter"
        )
    store = dist.distributed_c10d._get_default_store()
    members = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
    place = f"odc/queues/{uuid.uuid5(uuid.NAMESPACE_OID, members).hex}"
    number = store.add(f"{place}/{dist.get_rank()}", 1)
    return StoreCounter(dist.PrefixStore(f"{place}/{number}", store.clone()), timedelta_of(timeout).total_seconds())
