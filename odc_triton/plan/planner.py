"""Plans minibatches: by LB-Mini or another strategy, split over ranks, with shared prefixes, or for the work queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .cost import CostModel
from .plan import MinibatchPacks, Plan
from .queue import QUEUE, Counter, OwnCounter, QueuedPacks, queued
from .samples import Limits, Samples
from .shared import shared_plan
from .split import split_plan
from .strategies import BALANCES, STRATEGIES, Packs

SPLIT = "split"  # LB-Split, whatever else would take less
SHARED = "shared"  # tokens that samples share are computed once, whatever else would take less


def make_plan(samples: Samples, limits: Limits, balance: str = "mini") -> Plan:
    """Who computes what. Every rank computes the whole plan; nothing is communicated.

    samples: of the minibatch; none make an empty plan.
    limits: the ranks, and what they hold.
    balance: as in `MinibatchSampler`. With "mini" samples are split as far as `limits` allow, and tokens that they
        share are computed once, where that takes less. With a queue nothing is shared. Groups of samples are kept
        together by "mini".

    Raises ValueError for too few samples for the packs that they need, for samples over the cap that can't be cut, and
    for `split_tokens` or groups with a balance that can't split, or keep them.
    """
    if samples.groups is not None and balance not in ("mini", SHARED):
        raise ValueError(f"balance {balance!r} can't keep groups of samples together: use 'mini', or give no groups")
    if limits.split_tokens and balance in BALANCES and not STRATEGIES[balance].splits:
        raise ValueError(f"balance {balance!r} can't split samples: use 'mini', or split_tokens 0")
    if balance == QUEUE:
        plan = _queue_plan(samples, limits)
    elif not samples.tokens:
        plan = Plan(samples=samples, ready=[[] for _ in range(limits.ranks)])
    elif balance == SHARED or samples.groups is not None:
        plan = shared_plan(samples, limits)
    elif balance == SPLIT:
        plan = split_plan(samples, limits)
    elif balance == "mini":
        plan = _least_plan(samples, limits)
    elif balance in BALANCES:
        plan = _unsplit_plan(samples, limits, balance)
    else:
        raise ValueError(f"balance is {balance!r}: choose one of {', '.join(BALANCES)}")
    return replace(plan, checksum=samples.checksum)


def _least_plan(samples: Samples, limits: Limits) -> Plan:
    shared, splits = None, bool(limits.split_tokens)
    if samples.prefixes is not None and (splits or max(samples.tokens) <= limits.token_cap):
        cost = replace(samples.cost, head=0.0) if splits else samples.cost  # as `split_plan` counts
        shared = shared_plan(replace(samples, cost=cost), limits, required=False)
    split = split_plan(samples, limits) if splits else None
    if shared is not None and (split is None or shared.estimate <= split.estimate):
        return shared
    return _unsplit_plan(samples, limits, "mini") if split is None else split


def _queue_plan(samples: Samples, limits: Limits) -> Plan:
    """Waves of the samples that are split, and packs of the others."""
    plan = Plan(samples=samples, ready=[[] for _ in range(limits.ranks)])
    rest = samples
    if limits.split_tokens and samples.tokens:
        plan = split_plan(samples, limits, ride=False)
        rest = samples.some([place for own in plan.unpacked or () for place in own])
    packs = queued(rest, limits, plan.ready_cost) if rest.tokens else []
    return replace(plan, unpacked=None, queue=[[rest.names[i] for i in members] for members in packs])


def _unsplit_plan(samples: Samples, limits: Limits, balance: str) -> Plan:
    """By the strategy `balance`, one of `BALANCES`; at least one sample."""
    strategy, ranks = STRATEGIES[balance], limits.ranks
    if strategy.parts is not None:
        unpacked = strategy.parts(samples.prices, ranks)
        return Plan(samples=samples, token_cap=limits.token_cap, ready=[[] for _ in range(ranks)], unpacked=unpacked)
    assert strategy.packs is not None, "a strategy of BALANCES has one of the two"
    ready = strategy.packs(samples.tokens, samples.prices, ranks, limits.token_cap)
    return Plan(samples=samples, ready=[[[samples.names[i] for i in pack] for pack in own] for own in ready])


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
        """True if ranks may compute segments of one sample, or of samples that share tokens."""
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


def assign(
    lengths: Sequence[int],
    *,
    ranks: int,
    token_cap: int,
    balance: str,
    cost: CostModel | None = None,
    extra: Sequence[float] | None = None,
) -> list[Packs]:
    """Assigns samples to ranks and packs. Deterministic: the same arguments give the same result on every rank.

    Every index is in exactly one pack, no pack is empty or has more than `token_cap` tokens, a rank's packs come
    costliest first.

    lengths: tokens of each sample.
    ranks: their number.
    token_cap: the most tokens of a pack.
    balance: one of `BALANCES`.
    cost: by default `CostModel.paper_7b()`.
    extra: of each sample, what it costs in addition to its tokens, in the same units, such as `TowerCost.sample`.

    Returns by rank its packs, lists of indices into `lengths`. Raises ValueError for an unknown `balance`, `ranks` or
    `token_cap` below 1, empty lengths, lengths below 1 or over the cap, extra costs that don't fit, and, under "micro"
    and "global" only, too few samples for the packs that they need.
    """
    plan = _plan_of(lengths, ranks, token_cap, balance, cost, extra)
    return [[*plan.packs(rank)] for rank in range(ranks)]


def assign_one(
    lengths: Sequence[int],
    *,
    rank: int,
    ranks: int,
    token_cap: int,
    balance: str,
    cost: CostModel | None = None,
    extra: Sequence[float] | None = None,
) -> Packs:
    """`assign(...)[rank]`, without packing the other ranks' samples if nothing depends on it (LB-Mini).

    Every rank runs this before each minibatch: for 1,024 ranks of 16 samples it takes a fraction of `assign`'s time.

    rank: whose packs.
    lengths, ranks, token_cap, balance, cost, extra: as in `assign`.

    Raises IndexError for a `rank` that does not exist, and as `assign`.
    """
    return [*_plan_of(lengths, ranks, token_cap, balance, cost, extra).packs(rank)]


def _plan_of(
    lengths: Sequence[int],
    ranks: int,
    token_cap: int,
    balance: str,
    cost: CostModel | None,
    extra: Sequence[float] | None,
) -> Plan:
    if balance not in BALANCES:
        raise ValueError(f"balance is {balance!r}: choose one of {', '.join(BALANCES)}")
    limits = Limits(ranks=ranks, token_cap=token_cap)
    samples = Samples.of(limits.checked(lengths), cost or CostModel.paper_7b(), extra=extra)
    return _unsplit_plan(samples, limits, balance)
