"""The work queue: packs made in advance, taken at run time by whichever rank is free.

[Note: order of the queue] With longest first all ranks end at about the same time, at any speeds; but on equal
ranks it is a few percent slower than LB-Mini, which also tries other ways to pair long packs with short ones. So packs
are assigned as by LB-Mini, each rank's costliest first, and the queue holds them in the order in which that
plan would start them. Ranks as fast as planned become free in just that order: they take what LB-Mini assigns to them.
A slower rank takes fewer, and the packs left for the end are every rank's cheapest, as with longest first.

If sequences are split, each rank first runs its own waves, as planned: a wave's ranks wait for each other, so they
can't be whichever are free. A wave's parts have equal cost: ranks end their waves at about the same time, and
the order of the packs after them, of unsplit samples, is the same. An unsplit sample is fixed only where it fills a
rank's part of a wave: without it, that rank would wait there.

Ranks don't prefetch packs: with few packs per rank, one that is taken early and waits costs more than the store's
answer, a fraction of a millisecond (docs/work_queue.md has numbers).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from .cost import CostModel
from .entries import Entry, number_of
from .partition import balanced_partition
from .plan import Plan
from .samples import Limits, Samples

QUEUE = "queue"
_PACKS_PER_RANK = 16  # a sample shares a pack only up to this fraction of a rank's part

Packs = list[list[int]]  # each of indices into the minibatch's lengths


class Counter(Protocol):
    """A queue's interface to a store: a `StoreCounter`, or any torch.distributed.Store."""

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to the number under `key`, 0 at first, and returns the new one. Atomic over all ranks."""
        ...

    def delete_key(self, key: str) -> bool: ...


class OwnCounter:
    """The counter of a world of one rank, for any of its threads."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            value = self._values[key] = self._values.get(key, 0) + amount
        return value

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


def queue_packs(
    lengths: Sequence[int],
    *,
    ranks: int,
    token_cap: int,
    cost: CostModel | None = None,
    preload: float = 0.0,
    extra: Sequence[float] | None = None,
) -> Packs:
    """Indices of `lengths` (tokens) in packs of at most `token_cap` tokens, in the order in which to take them.

    Every index is in exactly one pack. Small samples share a pack that costs up to a sixteenth of a rank's part; the
    others are packs of one, as the last packs decide how evenly the ranks end. Deterministic: every rank that calls it
    with the same arguments gets the same packs.

    ranks: their number.
    cost: by default `CostModel.paper_7b()`; it affects the balance, never the result.
    preload: the cost of each rank's work before it takes a pack, which counts in the rank's part.
    extra: of each sample, what it costs in addition to its tokens.

    Raises ValueError for `ranks` or `token_cap` below 1, empty lengths, lengths below 1 or over the cap, and for extra
    costs that don't fit.
    """
    limits = Limits(ranks=ranks, token_cap=token_cap)
    return queued(Samples.of(limits.checked(lengths), cost or CostModel.paper_7b(), extra=extra), limits, preload)


def queued(samples: Samples, limits: Limits, preload: float) -> Packs:
    """`queue_packs` of samples that were checked and priced."""
    packs, prices = _packed(samples, limits, preload), samples.prices
    costs = [samples.cost.microbatch + math.fsum(prices[i] for i in members) for members in packs]
    # See [Note: order of the queue].
    starts: list[tuple[float, float, int]] = []
    for of_rank in balanced_partition(costs, limits.ranks):
        start = 0.0
        for place in sorted(of_rank, key=lambda place: -costs[place]):
            starts.append((start, -costs[place], place))
            start += costs[place]
    return [packs[place] for _, _, place in sorted(starts)]


def _packed(samples: Samples, limits: Limits, preload: float) -> Packs:
    lengths, prices = samples.tokens, samples.prices
    most = (math.fsum(prices) / limits.ranks + preload) / _PACKS_PER_RANK
    packs: Packs = []
    spent, tokens = math.inf, 0
    for index in sorted(range(len(lengths)), key=lambda i: -prices[i]):
        if spent + prices[index] > most or tokens + lengths[index] > limits.token_cap:
            packs.append([])
            spent, tokens = 0.0, 0
        packs[-1].append(index)
        spent, tokens = spent + prices[index], tokens + lengths[index]
    return packs


class QueuedPacks:
    """One minibatch's packs, shared by all ranks: iterating takes the next free pack until none is left.

        with minibatch(model, tokens=..., plan=queued) as mb:
            for pack in queued:  # indices into the data set
                ...

    It has `packs`, the shared ones; `waves`, by rank, its parts of the waves, which it runs before it takes a pack;
    `split`, the plan of the segments in them, None without segments; `samples`, in the minibatch; and `tokens`, the
    targets of this rank's `own_part`, None if the sampler does not know them.

    Take them inside the minibatch: ranks start together at its entry, and at its exit an incomplete one (a rank died, a
    microbatch raised) raises on every rank. The rank that computes a pack depends on timing; each pack is computed
    exactly once.

    plan: with a queue.
    key: of this minibatch in the counter.
    counter: shared by the ranks.
    rank: this one.
    """

    def __init__(self, plan: Plan, *, key: str, counter: Counter, rank: int) -> None:
        self.plan, self.rank = plan, rank
        assert plan.queue is not None, "the plan has no queue"
        self.packs, self.split = plan.queue, plan.split
        self.samples, self.checksum = plan.count, plan.checksum
        self.waves = [[*filter(None, own)] for own in plan.ready]
        self.taken: list[int] = []  # places in `packs` that this rank took
        self._key, self._counter = key, counter
        self._own = iter(self.waves[rank])
        self._is_empty = False
        self.tokens = plan.targets(self.own_part())

    def own_part(self) -> list[int]:
        """Samples whose tokens this rank counts: together the ranks' parts hold each of the minibatch's samples once.

        `minibatch(tokens=…)` needs tokens before the first pack is taken, and only their sum over the ranks matters.
        So a sample in segments is counted whole, by one rank: its segments have its targets, each once.
        """
        entries = (each for packs in (*self.waves, self.packs) for pack in packs for each in pack)
        return sorted({*map(number_of, entries)})[self.rank :: self.plan.ranks]

    def take(self) -> list[Entry] | None:
        """This rank's next wave, then the next free pack; None when all are taken.

        Raises DeadlineExceeded if the counter's store does not answer, DistNetworkError when its host is gone.
        """
        if (wave := next(self._own, None)) is not None:
            return wave
        if self._is_empty:
            return None
        place = self._counter.add(self._key, 1) - 1
        if place < len(self.packs):
            self.taken.append(place)
            return self.packs[place]
        self._is_empty = True
        if place == len(self.packs) + self.plan.ranks - 1:  # every rank finds it empty once: no rank will ask again
            self._counter.delete_key(self._key)
        return None

    def __iter__(self) -> Iterator[list[Entry]]:
        while (pack := self.take()) is not None:
            yield pack

    def __getstate__(self) -> dict[str, Any]:
        # A store can't be sent to a DataLoader's worker, which raises an error with the reason.
        return {**vars(self), "_counter": None}
