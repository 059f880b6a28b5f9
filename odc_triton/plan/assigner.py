"""Assigns a minibatch to the ranks: by LB-Mini or another strategy, split over ranks, or for the work queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .cost import CostModel
from .pieces import MinibatchPacks
from .queue import QUEUE, Counter, OwnCounter, QueuedPacks, queue_packs
from .relatives import Relatives
from .shared import assign_shared
from .split import SplitAssignment, assign_split
from .strategies import assign_one


@dataclass(kw_only=True)
class Assigner:
    """A rank's packs, minibatch after minibatch. Every rank computes the whole assignment; nothing is communicated.

    `balance` and `token_cap`: see `MinibatchSampler`; `split_tokens`: of each rank, the most tokens that others may
    read, 0 without splitting; `shared_tokens`: the same for samples that share tokens, by default `split_tokens`;
    `replicas`: see `assign_split`; `counter`: of a work queue, by default `store_counter()`, made on first use; `extra`
    and `floors`: see `assign_split`, here by name of a sample.
    """

    rank: int
    world: int
    token_cap: int
    balance: str
    cost: CostModel
    split_tokens: int = 0
    shared_tokens: int | None = None
    replicas: int = 1
    counter: Counter | None = None
    extra: Sequence[float] | None = None
    floors: Sequence[int] | None = None
    _queues: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.balance == QUEUE and self.split_tokens and self.replicas > 1:
            raise ValueError(
                f"balance {QUEUE!r} can't split sequences with {self.replicas} replicas: use 'mini', or split none"
            )

    @property
    def reads_others(self) -> bool:
        """True if ranks may compute pieces of one sample, or of samples that share tokens."""
        return bool(self.split_tokens or self.shared_tokens)

    def own(
        self, lengths: Sequence[int], names: Sequence[int], relatives: Relatives | None = None
    ) -> MinibatchPacks | QueuedPacks:
        """This rank's packs of samples of `lengths` tokens, called `names`; or the queue that all ranks take from.

        `relatives`: of the samples; in each pack their shared tokens are computed once. With a queue they are ignored,
        as with split sequences where splitting takes less.
        """
        if self.balance == QUEUE:
            return self._queued(lengths, names)
        if not lengths:
            return MinibatchPacks()
        shared = None
        if relatives is not None and (self.split_tokens or max(lengths) <= self.token_cap):
            shared = assign_shared(
                lengths,
                relatives,
                ranks=self.world,
                token_cap=self.token_cap,
                cost=replace(self.cost, head=0.0) if self.split_tokens else self.cost,  # as `assign_split` counts
                tokens=self.split_tokens if self.shared_tokens is None else self.shared_tokens,
                replicas=self.replicas,
                names=names,
                extra=_named(self.extra, names),
            )
        split = self._split(lengths, names) if self.split_tokens else None
        if shared is not None and (split is None or shared.estimate <= split.estimate):
            return MinibatchPacks.of(shared.packs[self.rank], shared.plan)
        if split is not None:
            return MinibatchPacks.of(split.packs(self.rank), split.plan)
        how = {"token_cap": self.token_cap, "balance": self.balance, "cost": self.cost}
        own = assign_one(lengths, rank=self.rank, ranks=self.world, **how, extra=_named(self.extra, names))
        return MinibatchPacks([names[i] for i in members] for members in own)

    def _queued(self, lengths: Sequence[int], names: Sequence[int]) -> QueuedPacks:
        if self.counter is None:
            if self.world == 1:
                self.counter = OwnCounter()
            else:
                from .counter import store_counter

                self.counter = store_counter()
        split = self._split(lengths, names, ride=False) if self.split_tokens and lengths else None
        whole = [i for of_rank in split.whole for i in of_rank] if split else range(len(lengths))
        packs = whole and queue_packs(
            [lengths[i] for i in whole],
            ranks=self.world,
            token_cap=self.token_cap,
            cost=self.cost,
            preload=split.waves_cost if split else 0.0,
            extra=_named(self.extra, [names[i] for i in whole]),
        )
        # Not by epoch and minibatch: those come again after load_state_dict, and a failed one leaves its key.
        key = f"minibatch/{self._queues}"
        self._queues += 1
        return QueuedPacks(
            [[names[whole[i]] for i in members] for members in packs],
            key=key,
            counter=self.counter,
            rank=self.rank,
            world=self.world,
            waves=split and [split.waves_of(rank) for rank in range(self.world)],
            split=split and split.plan,
        )

    def _split(self, lengths: Sequence[int], names: Sequence[int], *, ride: bool = True) -> SplitAssignment:
        return assign_split(
            lengths,
            ranks=self.world,
            token_cap=self.token_cap,
            tokens=self.split_tokens,
            cost=self.cost,
            replicas=self.replicas,
            names=names,
            ride=ride,
            extra=_named(self.extra, names),
            floors=_named(self.floors, names),
        )


def _named(values: Sequence[Any] | None, names: Sequence[int]) -> list[Any] | None:
    return None if values is None else [values[name] for name in names]
