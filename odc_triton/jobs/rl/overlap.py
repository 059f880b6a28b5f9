"""A rollout inside of the minibatch: ranks compute the completions that have come while others are still sampled.

Parameters change only at the optimizer step, so the update is the same. Ranks that sample do so first, then compute.
Where a vLLM server samples, threads of each rank wait for it. What has come, and who is free, goes into one log of all
ranks: see [Note: one log] in plan/arrivals.py. With the last completion every rank knows all of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...base.errors import GenerationAborted, RolloutStopped
from ...engine.minibatch import Participant
from ...plan.arrivals import Arrivals
from ...plan.cost import CostModel
from ...plan.counter import Log, StoreCounter
from ...plan.entries import Entry, named
from ...plan.plan import Plan
from ...plan.planner import Planner
from ...plan.relatives import find_relatives, first_own
from ...plan.samples import Limits, Samples
from ...step import StepPart
from ..launcher.launch import Interrupted
from .generation import SamplingOptions
from .learned import Learned
from .policy_loss import advantages
from .rollout import PromptSlot, Rollout, Sampler, failure, reason_of

_NAP_S = 2e-3
_JOIN_S = 5.0  # for all threads, whose requests were aborted


class OverlappedRollout(Participant):
    """The rollout of the minibatch that follows `open`. Iterating over it, inside, samples, and yields packs.

    `plan`: of what was left when the last completion came; None until then, and if nothing was. `rank`: this one, as
    packs have it.
    """

    name = "rollout"
    needs_all_ranks = True

    def __init__(
        self, sampler: Sampler, planner: Planner, cost: CostModel, *, shares_prefixes: bool, scale: Any
    ) -> None:
        """`planner`: has the limits; where it may split samples over ranks, it assigns what is left at the end.
        `scale`: of `advantages`, not "batch".
        """
        self.sampler, self.engine, self.planner, self.cost = sampler, sampler.engine, planner, cost
        self.rank = self.engine.rank
        self._shares_prefixes, self._scale = shares_prefixes, scale
        self._log: Log | None = None
        self._opened = 0

    def open(self, slots: list[PromptSlot], options: SamplingOptions, batch: Learned) -> None:
        """On all ranks, with the arguments of `Sampler.roll_out`. `batch` gets what is learned."""
        self._slots, self._options, self._batch = slots, options, batch
        self._key = f"overlapped/{self._opened}"
        self._opened += 1
        counter, planner = self.sampler.counter, self.planner
        self._log = Log(counter if isinstance(counter, StoreCounter) else None, f"{self._key}/log")
        self._arrivals = Arrivals(
            ranks=self.engine.world,
            left=len(slots),
            token_cap=planner.limits.token_cap,
            cost=self.cost,
            keeps=planner.reads_others,
        )
        self._made: dict[int, dict[str, Any]] = {}  # messages by slot
        self._holders: dict[int, int] = {}  # by slot, the rank that samples it
        self._ended: dict[str, Any] | None = None  # why it can't be completed
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._computed: list[tuple[float, float]] = []
        self._start_s = self._last_s = time.time()
        self.plan: Plan | None = None

    def __iter__(self) -> Iterator[list[Entry]]:
        self._begin_sampling()
        while (numbers := self._next()) is not None:
            yield from self._timed([self._entries(numbers)])
        if self._arrivals.rest and self._ended is None:
            yield from self._timed(self._rest())

    def rollout(self) -> Rollout:
        return self.sampler.joined(self._slots, self._made.values())

    def seconds(self) -> tuple[float, float]:
        """From the minibatch's beginning until the last completion came; of these, how long this rank computed."""
        hidden_s = sum(max(min(end_s, self._last_s) - start_s, 0.0) for start_s, end_s in self._computed)
        return self._last_s - self._start_s, hidden_s

    def _begin_sampling(self) -> None:
        sampler = self.sampler
        together, threads = sampler.together(self._slots), 1
        if not sampler.completions.samples_remotely:
            self._sample(together)
            return
        sampler.rewards.check()  # starts their process, which ends with the thread that starts it
        if sampler.function is None:  # a prompt's completions come when they are there, not when those of all are
            together, threads = 1, together
        self._threads = [
            threading.Thread(target=self._sample, args=(together,), name=f"odc-rollout-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _sample(self, together: int) -> None:
        """Samples and scores prompts until none is left."""
        sampler, rank, log = self.sampler, self.engine.rank, self._log
        try:
            while log is self._log and not self._is_closed and sampler.stop() is None:
                if not (taken := sampler.take(self._key, len(self._slots), together)):
                    return
                log.write({"took": [*taken], "rank": rank})
                for each in sampler.complete(taken, self._slots, self._options):
                    log.write({"came": each, "at_s": time.time()})
        except (Interrupted, GenerationAborted):  # in a rollout function; because of another thread, which says why
            pass
        except (Exception, SystemExit) as error:  # of a thread nobody would hear
            if log is self._log and not self._is_closed:
                self._error = error
                with contextlib.suppress(Exception):  # the store is gone, which every rank finds out
                    log.write({"ended": {"rank": rank, "failed": reason_of(error)}})

    def _read(self) -> None:
        for message in self._log.read():
            if self._ended is not None:
                return
            if "took" in message:
                self._holders |= dict.fromkeys(message["took"], message["rank"])
            elif "free" in message:
                self._arrivals.is_free(message["free"])
            elif "came" in message:
                self._last_s = message["at_s"]
                self._came(message["came"])
            elif self._arrivals.left:  # else all is there, and the step goes on
                self._ended = message["ended"]

    def _came(self, made: dict[str, Any]) -> None:
        place, batch = made["slot"], self._batch
        self._made[place] = made
        group, _, totals = self.sampler.group(made)
        numbers = batch.add(place, self._slots[place], group, advantages(totals[None], self._scale)[0].tolist())
        shares = self._shares_prefixes and all(one.prompt is None for one in group)
        shared = first_own(len(self._slots[place].prompt.ids)) if shares else 0
        self._arrivals.came({number: batch.length(number) for number in numbers}, shared)

    def _next(self) -> list[int] | None:
        """This rank's next pack, once there is one; None if there will be none."""
        own = self._arrivals.packs[self.engine.rank]
        self._log.write({"free": self.engine.rank})
        while not self._is_known(own):
            if self._missing(own):
                self._wait(own)
            else:  # this rank's own, whose requests have deadlines
                time.sleep(_NAP_S)
        return own.popleft() if own and self._ended is None else None

    @property
    def _purpose(self) -> str:
        return f"the completions of minibatch {self.engine.number}"

    def _wait(self, own: Sequence[list[int]]) -> None:
        """For the next completions of other ranks: the deadline is not for all of them."""
        left = self._arrivals.left
        with self.engine.events.span("wait", label="completions", microbatch=-1):
            self.engine.barrier.wait_for(
                self._purpose, lambda: self._missing(own) if self._arrivals.left == left else []
            )

    def _is_known(self, own: Sequence[list[int]]) -> bool:
        """What this rank computes next."""
        self._read()
        waits = self._arrivals.left and self._ended is None and not self._log.is_behind
        if waits and (signal := self.sampler.stop()) is not None:
            self._log.write({"ended": {"rank": self.engine.rank, "stop": signal}})
            self._read()
        is_known = bool(own) or self._arrivals.is_over or self._ended is not None
        if not is_known:  # a rank that died while it wrote has left a gap in the log
            self.engine.require_peers(self._purpose)
        return is_known

    def _missing(self, own: Sequence[list[int]]) -> list[int]:
        """The other ranks that sample what has not come, or that may take it."""
        if self._is_known(own):
            return []
        missing = {self._holders.get(place) for place in range(len(self._slots)) if place not in self._made}
        if None in missing or self._log.is_behind:
            missing = {*range(self.engine.world)}
        return sorted(missing - {self.engine.rank, None})

    def _entries(self, numbers: list[int]) -> list[Entry]:
        if not self._shares_prefixes:
            return [*numbers]
        relatives = find_relatives([self._batch.samples[number] for number in numbers])
        return [named(entry, numbers) for entry in relatives.entries(range(len(numbers)))]

    def _rest(self) -> Iterable[list[Entry]]:
        """This rank's packs of what is left, of which other ranks may compute segments."""
        limits, shares = self.planner.limits, self._shares_prefixes
        rows = rows_of(self._batch, [*self._arrivals.rest], limits, self.cost, shares_prefixes=shares)
        own = self.planner.packs(rows, self.engine.rank)
        self.plan = own.plan
        self.engine.give(split=own.split)
        return own

    def _timed(self, packs: Iterable[list[Entry]]) -> Iterator[list[Entry]]:
        for pack in packs:
            start_s = time.time()
            yield pack
            self._computed.append((start_s, time.time()))

    def leave(self) -> None:
        if self._log is None:
            return
        self._is_closed = True
        if self._threads and self._arrivals.left:
            self.sampler.completions.abort()
        end_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))

    def failed(self) -> None:
        """Other ranks need not wait for what this one would sample."""
        if self._log is not None:
            with contextlib.suppress(Exception):
                self._log.write({"ended": {"rank": self.engine.rank}})

    def exit(self) -> dict[str, Any] | None:
        return None if self._log is None else self._ended

    def settle(self, messages: list[dict[str, Any] | None] | None) -> None:
        """Raises RolloutFailed if sampling or scoring failed on a rank, RolloutStopped if one was asked to stop."""
        if self._log is None:
            return
        self._log.clear()
        self._log = None
        if self.engine.rank == 0:
            self.sampler.counter.delete_key(self._key)
        ended = next(filter(None, messages or ()), None)
        if ended is not None and "failed" in ended:
            raise failure({ended["rank"]: ended["failed"]}) from self._error
        if ended is not None and "stop" in ended:
            raise RolloutStopped(ended["stop"])


def rows_of(
    batch: Learned, numbers: Sequence[int], limits: Limits, cost: CostModel, *, shares_prefixes: bool
) -> Samples:
    """Some of the learned completions, to be planned."""
    relatives = find_relatives([batch.samples[number] for number in numbers]) if shares_prefixes else None
    lengths = limits.checked([*map(batch.length, numbers)]) if numbers else []
    return Samples.of(lengths, cost, names=numbers, prefixes=relatives)


class HiddenTime(StepPart):
    """`mean_s`: of the ranks, how long they computed before the step's last completion came."""

    def __init__(self, rollout: OverlappedRollout) -> None:
        self._rollout = rollout
        self.mean_s = 0.0

    def report(self) -> float:
        return self._rollout.seconds()[1]

    def settle(self, reports: list[float]) -> None:
        self.mean_s = sum(reports) / len(reports)
