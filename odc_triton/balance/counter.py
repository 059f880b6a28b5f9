"""A counter in the process group's store, for the work queue: no answer is waited for without a deadline."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

import torch.distributed as dist

from odc_triton.errors import DeadlineExceeded


class StoreCounter:
    """Atomic numbers in `store`, a connection that nothing else uses.

    A store whose host is stopped, not dead, does not answer, and torch's `add` knows no deadline. So a thread asks;
    it would hold the connection for ever, hence one of its own.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s

    def add(self, key: str, amount: int) -> int:
        """The new number under `key`. Raises DeadlineExceeded, and DistNetworkError when the store's host is gone."""
        answers: list[int] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(self._store.add(key, amount))
            except BaseException as error:
                errors.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(self._timeout_s)
        if asking.is_alive():
            raise DeadlineExceeded(
                [],
                f"the store has not said within {self._timeout_s:.1f} s which pack of {key!r} comes next: its host "
                f"(rank 0, or the launcher) is stopped or cannot be reached",
            )
        if errors:
            raise errors[0]
        return answers[0]

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)


def store_counter(group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(minutes=30)) -> StoreCounter:
    """A counter that the ranks of `group` (default: all) share, apart from every other call's.

    Every rank of the group calls it equally often and in the same order; nothing is waited for. `timeout`: how late
    an answer may be. Raises RuntimeError where there is no process group.
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
    return StoreCounter(dist.PrefixStore(f"{place}/{number}", store.clone()), timeout.total_seconds())
