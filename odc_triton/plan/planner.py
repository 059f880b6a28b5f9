"""Plans minibatches: by LB-Mini or another strategy, split over ranks, with shared prefixes, or for the work queue."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .plan import MinibatchPacks, Plan
from .queue import QUEUE, Counter, OwnCounter, QueuedPacks, queued
from .samples import Limits, Samples
from .shared import shared_plan
from .split import split_plan
from .strategies import BALANCES, unsplit_plan

SPLIT = "split"  # LB-Split, whatever else would take less
SHARED = "shared"  # tokens that samples share are computed once, whatever else would take less


def make_plan(samples: Samples, limits: Limits, balance: str = "mini") -> Plan:
    """Who computes what. Every rank computes the whole plan; nothing is communicated. No samples make an empty one.

    `balance`: see `MinibatchSampler`. With "mini" samples are split as far as `limits` allow, and tokens that they
    share are computed once, where that takes less. With a queue nothing is shared. SPLIT, SHARED: that in any case.

    Raises ValueError as the strategies.
    """
    if balance == QUEUE:
        plan = _queue_plan(samples, limits)
    elif not samples.tokens:
        plan = Plan(samples=samples, ready=[[] for _ in range(limits.ranks)])
    elif balance == SHARED:
        plan = shared_plan(samples, limits)
    elif balance == SPLIT:
        plan = split_plan(samples, limits)
    elif balance == "mini":
        plan = _least_plan(samples, limits)
    elif balance in BALANCES:
        plan = unsplit_plan(samples, limits, balance)
    else:
        raise ValueError(f"balance is {balance!r}: choose one of {', '.join(BALANCES)}")
    return replace(plan, checksum=samples.checksum)


def _least_plan(samples: Samples, limits: Limits) -> Plan:
    shared, splits = None, bool(limits.split_tokens)
    if samples.prefixes is not None and (splits or max(samples.tokens) <= limits.token_cap):
        cost = replace(samples.cost, head=0.0) if splits else samples.cost  # as `split_plan` counts
        shared = shared_plan(replace(samples, cost=cost), limits)
    split = split_plan(samples, limits) if splits else None
    if shared is not None and (split is None or shared.estimate <= split.estimate):
        return shared
    return unsplit_plan(samples, limits, "mini") if split is None else split


def _queue_plan(samples: Samples, limits: Limits) -> Plan:
    """Waves of the samples that are split, and packs of the others."""
    plan = Plan(samples=samples, ready=[[] for _ in range(limits.ranks)])
    rest = samples
    if limits.split_tokens and samples.tokens:
        plan = split_plan(samples, limits, ride=False)
        rest = samples.some([place for own in plan.unpacked for place in own])
    how = (limits.ranks, limits.token_cap, rest.cost, plan.ready_cost)
    packs = queued(rest.tokens, rest.prices, *how) if rest.tokens else []
    return replace(plan, unpacked=None, queue=[[rest.names[i] for i in members] for members in packs])


@dataclass(kw_only=True)
class Planner:
    """Plans of one kind, and what the ranks take at run time. `balance`: see `MinibatchSampler`. `counter`: of a work
    queue, by default `store_counter()`, made on first use.

    Raises ValueError for a queue that splits samples over several replicas.
    """

    limits: Limits
    balance: str = "mini"
    counter: Counter | None = None
    _queues: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.balance == QUEUE and self.limits.split_tokens and self.limits.replicas > 1:
            raise ValueError(
                f"balance {QUEUE!r} can't split sequences with {self.limits.replicas} replicas: use 'mini', or split "
                f"none"
            )

    @property
    def reads_others(self) -> bool:
        """True if ranks may compute pieces of one sample, or of samples that share tokens."""
        return bool(self.limits.split_tokens or self.limits.readable)

    def packs(self, samples: Samples, rank: int) -> MinibatchPacks | QueuedPacks:
        """That rank's packs of a minibatch; or the queue that all ranks take from."""
        plan = make_plan(samples, self.limits, self.balance)
        if self.balance != QUEUE:
            return plan.packs(rank)
        # Not by epoch and minibatch: those come again after load_state_dict, and a failed one leaves its key.
        key = f"minibatch/{self._queues}"
        self._queues += 1
        return QueuedPacks(plan, key=key, counter=self._counter(), rank=rank)

    def _counter(self) -> Counter:
        if self.counter is None:
            if self.limits.ranks == 1:
                self.counter = OwnCounter()
            else:
                from .counter import store_counter

                self.counter = store_counter()
        return self.counter
