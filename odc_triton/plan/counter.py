"""A counter in the process group's store, for the work queue, and a log of all ranks; every request has a deadline."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ..base.asking import Asker
from ..base.deadlines import Timeout, timedelta_of
from ..base.errors import DeadlineExceeded


class StoreCounter:
    """Atomic numbers in `store`, a connection that nothing else uses. For any thread. `store_counter` makes it.

    A store whose host is stopped, not dead, does not answer, and torch's `add` has no deadline: this one has.

    timeout_s: seconds of one request.
    number: of this counter among those of the job.
    """

    def __init__(self, store: dist.Store, timeout_s: float, number: int = 0) -> None:
        self._store, self._timeout_s, self.number = store, timeout_s, number
        self._is_lost = False
        self._asker = Asker("odc-counter")

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to the number under `key`, and returns the new one.

        Raises DeadlineExceeded if the store does not answer, DistNetworkError when its host is gone.
        """
        return self.ask("add", key, amount)

    def ask(self, method: str, *given: Any) -> Any:
        """What that method of the store returns for the arguments `given`. Raises as `add`."""
        if not self._is_lost:
            answer = self._asker.ask(partial(getattr(self._store, method), *given))
            if wait([answer], self._timeout_s).done:
                return answer.result()
            self._is_lost = True  # every later question would wait for this answer
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
        if self._store is None:
            return
        for place in self._own:
            self._store.delete_key(f"{self._key}/{place}")
        if 0 in self._own:
            self._store.delete_key(self._key)


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
    store: Any = dist.distributed_c10d._get_default_store()  # torch's stub lacks `clone`
    members = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
    place = f"odc/queues/{uuid.uuid5(uuid.NAMESPACE_OID, members).hex}"
    number = store.add(f"{place}/{dist.get_rank()}", 1)
    own = dist.PrefixStore(f"{place}/{number}", store.clone())
    return StoreCounter(own, timedelta_of(timeout).total_seconds(), number)
