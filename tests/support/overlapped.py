"""A rank's part in an overlapped rollout, without a model, a process group or other processes."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from odc_triton.jobs.rl.overlap import OverlappedRollout
from odc_triton.jobs.rl.rollout import Sampler
from odc_triton.plan.arrivals import Arrivals
from odc_triton.plan.cost import CostModel
from odc_triton.plan.counter import Log, StoreCounter
from odc_triton.plan.samples import Limits

Groups = tuple[tuple[int, ...], ...]  # tokens of each prompt's learned completions
SIGNAL = 15


class Fault(Exception):
    """What must not be."""


class Store(StoreCounter):
    """In place of the process group's. `nap`: called before a text is set."""

    def __init__(self, nap: Callable[[], None] = lambda: None) -> None:
        self.values, self.nap, self.mutex = {}, nap, threading.Lock()

    def ask(self, method: str, key: Any, value: Any = None) -> Any:
        if method == "set":
            self.nap()
        with self.mutex:
            if method in ("add", "set"):
                self.values[key] = value + self.values.get(key, 0) if method == "add" else value
            if method == "delete_key":
                return self.values.pop(key, None) is not None
            if method == "multi_get":
                return [self.values[each] for each in key]
            return all(each in self.values for each in key) if method == "check" else self.values.get(key)


class Batch:
    """In place of what is learned."""

    def __init__(self, groups: Groups) -> None:
        self.samples = self.tokens = {
            10 * place + at: each for place, group in enumerate(groups) for at, each in enumerate(group)
        }

    def add(self, place: int, *_: object) -> list[int]:
        return [number for number in self.tokens if number // 10 == place]

    def length(self, number: int) -> int:
        return self.tokens[number]


class Sampling:
    """In place of a rank's sampler, its rewards and its engines. Prompts have three tokens."""

    together, take = Sampler.together, Sampler.take
    function = None

    def __init__(self, rank: int, plan: Plan, store: Store, *, raises: bool = False) -> None:
        self.engine = SimpleNamespace(rank=rank, world=plan.ranks, number=0, barrier=self, events=self)
        self.engine.give = self.engine.require_peers = self.check
        self.counter, self.completions, self.rewards, self.samples_remotely = store, self, self, plan.threads > 0
        self.slots = [SimpleNamespace(prompt=SimpleNamespace(ids=[0] * 3), seeds=[0]) for _ in plan.groups]
        self.raises, self.decode, self.stop = raises, max(plan.threads, plan.together), lambda: None

    def group(self, made: dict[str, int]) -> tuple:
        return [SimpleNamespace(prompt=None)], None, torch.zeros(1)

    def complete(self, taken: range, *_: object) -> Iterator[dict[str, int]]:
        for place in taken:
            self.counter.nap()
            if self.raises:
                raise SystemExit("no completion")
            yield {"slot": place}

    def wait_for(self, purpose: str, missing: Callable[[], list[int]]) -> None:
        while missing():
            time.sleep(1e-4)

    def check(self, *_: object, **__: object) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    abort = span = check


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`threads`: of a rank, each of which waits for completions of another process; 0: it samples first, `together`
    prompts at a time. `faults`: what happens at any moment, once each. `holes`: places are taken before texts are set.
    """

    groups: Groups
    ranks: int = 2
    threads: int = 0
    together: int = 1
    keeps: bool = False
    faults: tuple[str, ...] = ()
    holes: bool = False
    without: str = ""  # the rule that is dropped


class Weaker(Arrivals):
    def _assign(self) -> None:
        while self._free and self._pool:  # a pack is given to all ranks that are free
            pack, free = self._pack(), [*self._free]
            self._free.clear()
            for rank in free:
                self.packs[rank].append(pack)


class Reader(OverlappedRollout):
    """What ranks know from their log."""

    def __init__(self, plan: Plan) -> None:
        planner = SimpleNamespace(limits=Limits(ranks=plan.ranks, token_cap=8), reads_others=plan.keeps)
        sampler = Sampling(0, plan, Store())
        cost = CostModel(quadratic=0, linear=1)
        super().__init__(sampler, planner, cost, shares_prefixes=True, scale="none")
        self.open(sampler.slots, None, Batch(plan.groups))
        self.without = plan.without
        if self.without == "one pack for one rank":
            self._arrivals.__class__ = Weaker

    def after(self, text: str) -> Reader:
        """After one message more, behind which there is a hole."""
        self._log = None
        it = copy.copy(self)
        it._arrivals, it._made, it._holders = pickle.loads(pickle.dumps((self._arrivals, self._made, self._holders)))
        it._log = Log(Store(), "log")
        it._log._store.values |= {"log": 3, "log/0": text, "log/2": "behind a hole"}
        it._read()
        if "ended" in (message := json.loads(text)):
            if it.without == "no end after the last completion":
                it._ended = it._ended or message["ended"]
            if it.without == "the first end counts":
                it._ended = message["ended"] if it._ended else None
        return it

    def _missing(self, own: Any) -> list[int]:
        found = super()._missing(own)
        if self.without == "anyone may take a prompt":
            return [rank for rank in found if rank in self._holders.values()]
        return found

    @property
    def state(self) -> tuple:
        """What follows depends on it. Rules that hold need no history."""
        it = self._arrivals
        pool = tuple(sorted((*each.members, each.left) for each in it._pool))
        packs = repr(it.packs) if self.without else tuple(map(len, it.packs))
        holders = tuple(sorted(each for each in self._holders.items() if each[0] not in self._made))
        return packs, pool, (*it._free,), (*it.rest,), holders, frozenset(self._made), str(self._ended)

    def check(self) -> None:
        it = self._arrivals
        numbers = [number for packs in it.packs for pack in packs for number in pack]
        numbers += [number for group in it._pool for number, _ in group.members] + [*it.rest]
        if sorted(numbers) != [number for number in sorted(self._batch.tokens) if number // 10 in self._made]:
            raise Fault(f"of prompts {[*self._made]} the completions {sorted(numbers)} were given")

    def looks(self, rank: int, packs: int, is_stopped: bool, is_behind: bool) -> tuple:
        """After `packs` packs: whether it knows what comes next, the pack, what it writes, for whom it waits."""
        self.engine.rank = rank
        own, written = deque([*self._arrivals.packs[rank]][packs:]), []
        self._log = Log(Store(), "log")
        self._log.write, self._log._own = written.append, [0] * is_behind
        self.sampler.stop = lambda: SIGNAL if is_stopped and self.without != "a stop is written" else None
        known, missing = self._is_known(own), self._missing(own)
        return known, bool(own) and self._ended is None, bool(written), missing
