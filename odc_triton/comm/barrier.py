"""A barrier at which ranks exchange messages: the few points of a minibatch where ranks wait for each other.

It goes through the process group's store: each rank sets its own key and waits for all others. So every rank knows
which ranks are missing, even if rank 0 is dead, and why a peer failed.
`torch.distributed.monitored_barrier` reports only to rank 0, and after one failure gloo's later calls fail too.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..base.asking import Asker
from ..base.errors import DeadlineExceeded, RankLost, RanksDiffer
from .memory.heap import LEFT, Status, StatusBoard

log = logging.getLogger("odc_triton")

_CHECK_S = 0.5  # how often a waiting rank checks that its peers are alive
_FIRST_WARNING_S = 60.0
_ABORTED = "(gave up)"
_PROBE = 0x0DC  # the tag of messages that try a connection
_SHORTEST_NAP_S, _LONGEST_NAP_S = 100e-6, 5e-3
_RECENT = 0.75  # of the deadline: a rank that stands still has not waited since
_KEPT = 64  # exchanges whose keys stay in the store: deleting them takes as long as reading a message
_BLAMES = 2  # of a rank that has given up: more than this is the rank that it blames


def host_of(store: dist.Store) -> tuple[str | None, int]:
    """Host and port of a TCPStore; of others (None, 0)."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else (None, 0)


def _is_connected(peer: int) -> bool:
    """True while gloo's connection to rank `peer` of the job holds, which the kernel closes when its process dies, on
    another host too. True where the process group has no gloo.
    """
    try:
        gloo: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))  # a stub lacks `send`
    except RuntimeError:  # of GPUs alone
        return True
    if gloo.name() != "gloo":
        return True
    try:
        gloo.send([torch.zeros(1, dtype=torch.uint8)], peer, _PROBE)  # only announced: it is never received
    except RuntimeError:
        return False
    return True


class Barrier:
    """The barrier of the ranks of one engine, which all pass it in the same order; `passed`: how often.

    `timeout_s`: how late a live rank may be, counted from its last sign of life while it is `working`. A rank whose
    process is gone is named after `_CHECK_S`.
    """

    def __init__(self, *, store: dist.Store, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.passed, self.number = 0, 0  # `number`: of `under_prefix`
        self._store, self._has_deadlines = store, host_of(store)[0] is None
        self._answer: Future | None = None  # the store's
        self._asker: Asker | None = None
        self._blamed: list[int] = []
        self.board: StatusBoard | None = None  # None until `watch`
        self.is_connected: Callable[[int], bool] = lambda peer: True  # finds dead ranks until then
        self._numbers = count(1)  # of signs, over all work: peers look for a change
        self.guards: list[Callable[[str], None]] = []  # raise if ranks of another engine are lost, given a purpose
        self.blocked_on: list[Callable[[int], int | None]] = []  # features': for whom a rank waits between barriers

    def watch(self, board: StatusBoard) -> None:
        """From now on ranks see each other's status, which separates dead ranks from late ones."""
        self.board = board
        self._reached = Status(board)  # how many barriers the rank has reached
        self._broken = Status(board)  # not 0 once the rank has given up on its peers
        self._minibatch = Status(board)
        self._waits = Status(board)  # changes while the rank waits
        self._signs = Status(board)  # changes while the rank is `working`

    def status(self) -> Status:
        """A new one, which no other uses. Needs `watch`."""
        assert self.board is not None, "ranks don't see each other's status yet"
        return Status(self.board)

    def show(self, *, minibatch: int, broken: bool) -> None:
        """Shows peers where this rank is."""
        self._broken.show(self._blame() if broken else 0)
        self._minibatch.show(minibatch)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work that may take any time: a thread shows signs of life, and the others' deadline counts from the
        last one. In a process that is stopped threads stop too. Needs `watch`.
        """
        ended, pause_s = threading.Event(), min(_CHECK_S, self.timeout_s / 4)

        def show_signs() -> None:
            while not ended.wait(pause_s):
                self._signs.show(next(self._numbers))

        self._signs.show(next(self._numbers))
        thread = threading.Thread(target=show_signs, name="odc-signs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _blame(self) -> int:
        return _BLAMES + self._blamed[0] if self._blamed else 1

    def _key(self, number: int, rank: int) -> str:
        return f"barrier/{number}/{rank}"

    def post(self, purpose: str, message: dict[str, Any]) -> None:
        """Leaves this rank's message for the next exchange, waiting for no rank; leaves none while the store does not
        answer, as its client would wait for the last answer.
        """
        if self._answer is not None and wait([self._answer], _CHECK_S).not_done:
            return
        self._store.set(self._key(self.passed, self.rank), json.dumps({"purpose": purpose, **message}))
        if self.board is not None:
            self._reached.show(self.passed + 1)

    def abort(self, reason: str) -> None:
        """Makes peers raise RankLost with `reason` at the next exchange, whatever its purpose. Does not wait."""
        self.post(_ABORTED, {"reason": reason})

    @classmethod
    def under_prefix(
        cls, store: dist.Store, prefix: str, *, rank: int, ranks: Sequence[int], timeout: timedelta
    ) -> Barrier:
        """A barrier with keys of its own: the n-th call of these ranks with this prefix.

        `ranks`: by their numbers in the job; `rank`: this one's place among them.
        """
        number = store.add(f"{prefix}/calls/{rank}", 1)
        barrier = cls(
            store=dist.PrefixStore(f"{prefix}/{number}", store),
            rank=rank,
            world=len(ranks),
            timeout_s=timeout.total_seconds(),
        )
        barrier.number = number
        barrier.is_connected = lambda peer: _is_connected(ranks[peer])
        return barrier

    def exchange(self, purpose: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Waits for all ranks and returns their messages, by rank.

        Raises RankLost if a peer's process is gone or a peer gave up, DeadlineExceeded if a live one is later than
        `timeout_s`, RanksDiffer for another purpose, and with the text that a peer has posted as "refused".
        """
        number = self.passed
        keys = [self._key(number, rank) for rank in range(self.world)]
        try:
            if (last := self._answer) is not None:  # old keys are being deleted: `post` would not wait
                self.wait_until(f"{purpose}: the store on its host", lambda: [] if last.done() else [0])
            self.post(purpose, message)
            self.wait_until(purpose, lambda: self._missing(number, keys))
            answer = self._ask(lambda: self._store.multi_get(keys))
            wait([answer], _LONGEST_NAP_S)  # wakes sooner than a nap
            self.wait_until(f"{purpose}: the store on its host", lambda: [] if answer.done() else [0])
            messages = [json.loads(text) for text in answer.result()]
            # Ranks that have set their keys for this exchange have left those before, whose keys are no longer read.
            if number and number % _KEPT == 0:
                old = [self._key(each, self.rank) for each in range(number - _KEPT, number)]
                self._ask(lambda: [self._store.delete_key(key) for key in old])
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            self.raise_lost(purpose, list(range(self.world)), error)
        self.passed += 1
        for peer, theirs in enumerate(messages):
            if theirs["purpose"] == _ABORTED:
                words = f"rank {self.rank} was waiting for '{purpose}': rank {peer} gave up ({theirs['reason']})"
                raise RankLost([peer], f"{words}. Start again from the last checkpoint.")
        for peer, theirs in enumerate(messages):
            if theirs["purpose"] != purpose:
                raise RanksDiffer(
                    f"rank {self.rank} is at '{purpose}' while rank {peer} is at '{theirs['purpose']}': "
                    f"all ranks must make the same calls in the same order"
                )
        if refused := [theirs["refused"] for theirs in messages if "refused" in theirs]:
            raise RanksDiffer(refused[0])
        return messages

    def _ask(self, question: Callable[[], Any]) -> Future:
        """The store's answer, which may not come: a TCPStore is on rank 0's host."""
        if self._has_deadlines or self.board is None:
            answer = Future()
            answer.set_result(question())
            return answer
        self._asker = self._asker or Asker("odc-store")
        self._answer = self._asker.ask(question)
        return self._answer

    def _missing(self, number: int, keys: list[str]) -> list[int]:
        """The ranks that have not reached exchange `number`: by their status, if there is one, as a store whose host
        is stopped does not answer, and asking it has no deadline."""
        if self.board is not None:
            return [rank for rank, reached in enumerate(self._reached.seen()) if reached <= number]
        if self._store.check(keys):
            return []
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def wait_until(self, purpose: str, missing: Callable[[], list[int]]) -> None:
        """Waits until `missing()`, the ranks that have not arrived yet, is empty; raises as `exchange` does."""
        start_s = time.monotonic()
        warn_at_s = min(_FIRST_WARNING_S, self.timeout_s / 2)
        check_at_s, late_at_s = _CHECK_S, self.timeout_s
        waits: list[int] = []
        last_s: dict[int, float] = {}  # when others were seen waiting
        signs = [0] * self.world
        sign_s = dict.fromkeys(range(self.world), 0.0)  # when others were seen working
        while ranks := missing():
            waited_s = time.monotonic() - start_s
            if waited_s > min(check_at_s, late_at_s):
                check_at_s = waited_s + _CHECK_S
                for guard in self.guards:
                    guard(purpose)
                self.require_alive(ranks, purpose, missing)
                ranks = self.root_cause(ranks)
                if self.board is not None:
                    broken = self._broken.seen()
                    if given_up := [rank for rank, value in enumerate(broken) if value - _BLAMES in ranks]:
                        self._gave_up(purpose, given_up)
                    before, waits = waits, self._waits.seen()
                    self._waits.show(waits[self.rank] + 1)
                    last_s |= {rank: waited_s for rank, was in enumerate(before) if waits[rank] != was}
                    since_s = waited_s - _RECENT * self.timeout_s
                    ranks = [rank for rank in ranks if last_s.get(rank, -math.inf) < since_s] or ranks
                    before, signs = signs, self._signs.seen()
                    sign_s |= {rank: waited_s for rank, was in enumerate(before) if signs[rank] != was}
                quiet_since_s = min(sign_s[rank] for rank in ranks)
                ranks = [rank for rank in ranks if sign_s[rank] == quiet_since_s]
                late_at_s = quiet_since_s + self.timeout_s
                words = self._words(purpose, ranks, waited_s)
                if waited_s > late_at_s:
                    silent = f", with no sign of life for {waited_s - quiet_since_s:.1f} s" if quiet_since_s else ""
                    self.raise_late(purpose, DeadlineExceeded(ranks, f"{words}{silent}: the deadline has passed"))
                if waited_s > warn_at_s:
                    works = quiet_since_s and waited_s - quiet_since_s < 2 * _CHECK_S
                    log.warning(
                        "%s; %s", words, "it is working" if works else f"its deadline is {self.timeout_s:.0f} s"
                    )
                    warn_at_s *= 2
            time.sleep(min(max(waited_s / 50, _SHORTEST_NAP_S), _LONGEST_NAP_S))

    def wait_for(self, purpose: str, missing: Callable[[], list[int]]) -> None:
        """As `wait_until`, between barriers: raises RankLost too if a missing rank has given up."""

        def missing_and_willing() -> list[int]:
            ranks = missing()
            if ranks:
                broken = self._broken.seen()
                given_up = [rank for rank in ranks if broken[rank]]
                if given_up and missing():
                    everyone = list(range(self.world))
                    self.require_alive(everyone, purpose, lambda: everyone)  # a rank that died is to blame
                    self._gave_up(purpose, given_up)
            return ranks

        self.wait_until(purpose, missing_and_willing)

    def _gave_up(self, purpose: str, ranks: list[int], cause: Exception | None = None) -> NoReturn:
        """Raises DeadlineExceeded for those because of whom `ranks` have given up, RankLost if these are not known."""
        causes = self._causes(ranks)
        if causes != ranks:
            names = ", ".join(f"rank {rank}" for rank in causes)
            words = f"rank {self.rank} was waiting for {names} at '{purpose}'{self._where(causes)}"
            self.raise_late(purpose, DeadlineExceeded(causes, f"{words}: ranks {ranks} have given up because of that"))
        words = f"rank {self.rank} was waiting for '{purpose}': ranks {ranks} have given up"
        raise RankLost(ranks, f"{words}. Start again from the last checkpoint.") from cause

    def _causes(self, ranks: list[int]) -> list[int]:
        """`ranks`, and in place of those that have given up because of another rank that one."""
        broken = self._broken.seen()
        blamed = {rank: broken[rank] - _BLAMES for rank in ranks if broken[rank] >= _BLAMES}
        found = {rank if broken[blamed.get(rank, rank)] >= _BLAMES else blamed.get(rank, rank) for rank in ranks}
        return sorted(found - {self.rank}) or ranks

    def root_cause(self, ranks: list[int]) -> list[int]:
        """Follows wait-for edges from `ranks` to the root cause: a rank that waits for none, or in a cycle, is its own
        root.
        """
        if self.board is not None:
            ranks = self._causes(ranks)
        if not self.blocked_on:
            return ranks
        reached = self._reached.seen()
        found = set()
        for rank in ranks:
            chain = [rank]
            # A rank that is at the next barrier already does nothing more for others.
            while (on := self._blocked_on(chain[-1])) is not None and reached[on] <= self.passed:
                if on in chain:
                    chain = [rank]
                    break
                chain.append(on)
            found.add(chain[-1])
        return sorted(found)

    def _blocked_on(self, rank: int) -> int | None:
        return next((on for source in self.blocked_on if (on := source(rank)) is not None), None)

    def raise_late(self, purpose: str, error: DeadlineExceeded) -> NoReturn:
        """Raises RankLost if a rank is gone: others may be late for that alone. Else raises `error`."""
        ranks = list(error.ranks)
        if self.board is not None:
            # Of those for which this rank did not wait, one that has left or given up is not to blame.
            excused = [any(status) for status in zip(self.board.seen(LEFT), self._broken.seen(), strict=True)]
            ranks = [rank for rank in range(self.world) if rank in ranks or not excused[rank]]
        self.require_alive(ranks, purpose, lambda: ranks)
        self._blamed = list(error.ranks)
        if self.board is not None:
            self._broken.show(self._blame())  # before this rank leaves: others are about to miss it
        raise error

    def _is_alive(self, rank: int) -> bool:
        if self.board is not None:
            return self.board.is_alive(rank)
        return rank == self.rank or self.is_connected(rank)

    def require_alive(self, ranks: Sequence[int], purpose: str, missing: Callable[[], Sequence[int]]) -> None:
        gone = [rank for rank in ranks if not self._is_alive(rank)]
        if gone:
            # A rank that arrived at the last moment and then ended has not failed this wait.
            gone = sorted(set(gone) & set(missing()))
        if gone:
            self.raise_lost(purpose, gone, None)

    def raise_lost(self, purpose: str, ranks: list[int], cause: Exception | None) -> NoReturn:
        """Raises RankLost for those of `ranks` that are gone. `cause`: an error of the store or of a collective."""
        if isinstance(cause, dist.DistStoreError):
            unknown = f"the rendezvous store does not answer ({str(cause).splitlines()[0]})"
        elif isinstance(cause, dist.DistNetworkError):
            unknown = "the rendezvous store is gone"
        else:
            unknown = f"the connection to ranks {ranks} broke: {cause}"
        gone = self._gone(ranks, at_once=cause is None)
        # A rank that gave up because another ended is not to blame.
        none = [0] * self.world
        broken, left = (none, none) if self.board is None else (self._broken.seen(), self.board.seen(LEFT))
        ranks = self._blamed = [rank for rank in gone if not broken[rank]] or gone
        if ranks and all(broken[rank] for rank in ranks) and self._causes(ranks) != ranks:
            self._gave_up(purpose, ranks, cause)
        words = ", ".join(f"rank {rank} {'left the training loop' if left[rank] else 'died'}" for rank in ranks)
        raise RankLost(
            ranks,
            f"rank {self.rank} was waiting for '{purpose}': {words or unknown}"
            f"{self._where(ranks)}. Start again from the last checkpoint.",
        ) from cause

    def _gone(self, ranks: list[int], *, at_once: bool) -> list[int]:
        """Those of `ranks` whose processes are gone: a dying one takes a moment to release its locks."""
        for _ in range(1 if at_once else 20):
            gone = [rank for rank in ranks if not self._is_alive(rank)]
            if gone:
                break
            time.sleep(0.1)
        return gone

    def name_lost(self, purpose: str, cause: Exception) -> None:
        """After an error of others' communication, as gloo's: raises RankLost if a rank's process is gone."""
        if gone := self._gone(list(range(self.world)), at_once=False):
            self.raise_lost(purpose, gone, cause)

    def _words(self, purpose: str, missing: list[int], waited_s: float) -> str:
        names = ", ".join(str(rank) for rank in missing)
        return (
            f"rank {self.rank} has waited {waited_s:.1f} s for rank{'s' if len(missing) > 1 else ''} {names} "
            f"at '{purpose}'{self._where(missing)}"
        )

    def _where(self, ranks: list[int]) -> str:
        if self.board is None or not ranks:
            return ""
        minibatches = self._minibatch.seen()
        return f" (last seen in minibatch {', '.join(str(minibatches[rank]) for rank in ranks)})"
