"""A counter in the process group's store, for the work queue; every request has a deadline."""

from __future__ import annotations

import threading
import uuid
import weakref
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch.distributed as dist

from ..base.deadlines import Timeout, timedelta_of
from ..base.errors import DeadlineExceeded


class StoreCounter:
    """Atomic numbers in `store`, a connection that nothing else uses. For one thread at a time.

    A store whose host is stopped, not dead, does not answer, and torch's `add` has no deadline. So a dedicated thread
    sends requests over a dedicated connection, where it may block forever. The thread is kept: on a busy machine a new
    thread for each request would take many times longer to start than the store to answer.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._is_lost = False
        self._questions: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._answers: SimpleQueue[int | BaseException] = SimpleQueue()
        threading.Thread(target=_ask, args=(store, self._questions, self._answers), daemon=True).start()
        weakref.finalize(self, self._questions.put, None)

    def add(self, key: str, amount: int) -> int:
        """The new number under `key`. Raises DeadlineExceeded, and DistNetworkError when the store's host is gone."""
        if not self._is_lost:
            self._questions.put((key, amount))
            try:
                answer = self._answers.get(timeout=self._timeout_s)
            except Empty:
                self._is_lost = True  # a late answer would be taken for the next request's
            else:
                if isinstance(answer, BaseException):
                    raise answer
                return answer
        raise DeadlineExceeded(
            [],
            f"the store did not say within {self._timeout_s:.1f} s which pack of {key!r} comes next: its host "
            f"(rank 0, or the launcher) is stopped or unreachable",
        )

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)


def _ask(store: dist.Store, questions: SimpleQueue, answers: SimpleQueue) -> None:
    """Holds no reference to the StoreCounter, so that the thread ends when the counter is freed."""
    while (question := questions.get()) is not None:
        try:
            answers.put(store.add(*question))
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
