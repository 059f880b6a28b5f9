"""Meetings: the few points of a minibatch where ranks wait for each other.

A meeting goes through the process group's store: each rank sets its own key and waits for everybody's. So every
rank by itself knows who is missing, also when rank 0 is the dead one, and why a peer failed.
`torch.distributed.monitored_barrier` tells only rank 0, and after one failure gloo's later calls fail too.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .errors import DeadlineExceeded, RankLost
from .memory.heap import SymmetricHeap, Word

log = logging.getLogger("odc_triton")

_LOOK_S = 0.5  # how often a waiting rank looks whether its peers still live
_FIRST_WARNING_S = 60.0
_SHORTEST_NAP_S, _LONGEST_NAP_S = 100e-6, 5e-3


class Meetings:
    """Numbered meetings of the ranks of one engine, all held in the same order on every rank.

    `timeout_s` is how late a live rank may be; a rank whose process is gone is named after `_LOOK_S`.
    """

    def __init__(self, *, store: dist.Store, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.held = 0
        self._store = store
        self.heap: SymmetricHeap | None = None  # set once it exists: then the dead are known from the late

    def _key(self, number: int, rank: int) -> str:
        return f"meeting/{number}/{rank}"

    def tell(self, purpose: str, message: dict[str, Any]) -> None:
        """Leaves this rank's message for the next meeting without waiting for anybody."""
        self._store.set(self._key(self.held, self.rank), json.dumps({"purpose": purpose, **message}))

    def meet(self, purpose: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Waits for all ranks and returns their messages, by rank.

        Raises RankLost when a peer's process is gone, DeadlineExceeded when a live one is later than `timeout_s`.
        """
        number = self.held
        keys = [self._key(number, rank) for rank in range(self.world)]
        try:
            self.tell(purpose, message)
            self._wait(purpose, keys)
            messages = [json.loads(text) for text in self._store.multi_get(keys)]
        except dist.DistNetworkError as error:
            self._lost(purpose, list(range(self.world)), error)
        self.held += 1
        # Whoever holds this meeting's keys has left the one before: nobody reads those any more.
        if number > 0:
            self._store.delete_key(self._key(number - 1, self.rank))
        for peer, theirs in enumerate(messages):
            if theirs["purpose"] != purpose:
                raise RuntimeError(
                    f"rank {self.rank} is at '{purpose}' while rank {peer} is at '{theirs['purpose']}': "
                    f"the ranks' training loops call different things"
                )
        return messages

    def _wait(self, purpose: str, keys: list[str]) -> None:
        start_s = time.monotonic()
        warn_at_s = min(_FIRST_WARNING_S, self.timeout_s / 2)
        look_at_s = _LOOK_S
        # Polled, as `store.wait` with a short timeout prints two warnings each time that it expires.
        while not self._store.check(keys):
            waited_s = time.monotonic() - start_s
            if waited_s > min(look_at_s, self.timeout_s):
                look_at_s = waited_s + _LOOK_S
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                self.require_alive(missing, purpose)
                if missing and waited_s > self.timeout_s:
                    words = self._words(purpose, missing, waited_s)
                    raise DeadlineExceeded(missing, f"{words}: the deadline has passed")
                if missing and waited_s > warn_at_s:
                    log.warning("%s; its deadline is %.0f s", self._words(purpose, missing, waited_s), self.timeout_s)
                    warn_at_s *= 2
            time.sleep(min(max(waited_s / 50, _SHORTEST_NAP_S), _LONGEST_NAP_S))

    def wait_until(self, purpose: str, missing: Callable[[], list[int]]) -> None:
        """Waits, with the same deadline, until `missing()` is empty: for what peers show in the heap."""
        start_s = time.monotonic()
        nap_s = 50e-6
        while ranks := missing():
            waited_s = time.monotonic() - start_s
            self.require_alive(ranks, purpose)
            if waited_s > self.timeout_s:
                raise DeadlineExceeded(ranks, f"{self._words(purpose, ranks, waited_s)}: the deadline has passed")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, 5e-3)

    def require_alive(self, ranks: list[int], purpose: str) -> None:
        if self.heap is None:
            return
        gone = [rank for rank in ranks if not self.heap.is_alive(rank)]
        if gone:
            self._lost(purpose, gone, None)

    def _lost(self, purpose: str, ranks: list[int], cause: Exception | None) -> None:
        if cause is not None and self.heap is not None:
            # The store's host is a rank or the launcher; a dying rank needs a moment to let its locks go.
            for _ in range(20):
                gone = [rank for rank in ranks if not self.heap.is_alive(rank)]
                if gone:
                    break
                time.sleep(0.1)
            ranks = gone
        left = self.heap.seen(Word.LEFT) if self.heap is not None else [0] * self.world
        words = ", ".join(f"rank {rank} {'left the training loop' if left[rank] else 'died'}" for rank in ranks)
        raise RankLost(
            ranks,
            f"rank {self.rank} was waiting for '{purpose}': {words or 'the rendezvous store is gone'}"
            f"{self._where(ranks)}. Start again from the last checkpoint.",
        ) from cause

    def _words(self, purpose: str, missing: list[int], waited_s: float) -> str:
        names = ", ".join(str(rank) for rank in missing)
        return (
            f"rank {self.rank} has waited {waited_s:.1f} s for rank{'s' if len(missing) > 1 else ''} {names} "
            f"at '{purpose}'{self._where(missing)}"
        )

    def _where(self, ranks: list[int]) -> str:
        if self.heap is None or not ranks:
            return ""
        minibatches = self.heap.seen(Word.MINIBATCH)
        return f" (last seen in minibatch {', '.join(str(minibatches[rank]) for rank in ranks)})"
