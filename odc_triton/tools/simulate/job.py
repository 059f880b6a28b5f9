"""A job to simulate: its machine, its model and the assignment of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...plan.cost import CostModel
from ...plan.entries import Entry, Segment
from ...plan.planner import SHARED, SPLIT, make_plan
from ...plan.relatives import Relatives
from ...plan.samples import Limits, Samples
from ...plan.segments import SplitPlan
from ...plan.split import readable_tokens
from ...plan.strategies import STRATEGIES
from .hardware import Links
from .models import Model

if TYPE_CHECKING:
    from ..memory.footprint import MemoryPlan

ALL_BALANCES = (*STRATEGIES, SPLIT, SHARED)

Packs = list[list[int | Segment]]  # one rank's: per microbatch the tokens of its documents, or segments


class SharedPack(list):
    """A pack of samples that share tokens. `fetched`: the tokens whose keys and values it reads from other ranks;
    `wave`: of the pack, None if it neither reads from other ranks nor is read.
    """

    fetched = 0
    wave: int | None = None

    @classmethod
    def of(
        cls, entries: Sequence[int | Segment], lengths: Sequence[int], rank: int, plan: SplitPlan | None
    ) -> SharedPack:
        made = cls(sizes_of(entries, lengths))
        fetched: dict[Segment, int] = {}  # siblings read the same rows once
        for each in made:
            if plan is None or not isinstance(each, Segment) or (planned := plan.find(each)) is None:
                continue
            made.wave = planned.wave
            for holder, low, high in plan.reads(each):
                if holder.rank != rank:
                    fetched[holder.segment] = max(high - low, fetched.get(holder.segment, 0))
        made.fetched = sum(fetched.values())
        return made


def assign_packs(
    lengths: Sequence[int],
    *,
    ranks: int,
    token_cap: int,
    balance: str,
    cost: CostModel,
    split_tokens: int = 0,
    replicas: int = 1,
    relatives: Relatives | None = None,
) -> list[Packs]:
    """Each rank's packs, in lengths, not indices. `split_tokens`: the most that others read of each rank; 0: as many
    as these lengths need, and for "shared" none. `replicas`: each splits its own samples. `relatives`: of the samples,
    for "shared". Raises as `Limits`, `Samples.of` and `make_plan`, and ValueError for "shared" without them.
    """
    if balance == SHARED and relatives is None:
        raise ValueError(f"balance {SHARED!r} needs to know what the samples share: give `relatives`")
    if balance not in (SPLIT, SHARED):
        split_tokens = 0
    if balance == SPLIT and not split_tokens:
        how = {"ranks": ranks, "token_cap": token_cap, "cost": cost, "replicas": replicas}
        split_tokens = readable_tokens(lengths, samples=len(lengths), **how)
    limits = Limits(ranks=ranks, token_cap=token_cap, replicas=replicas, split_tokens=split_tokens)
    samples = Samples.of(limits.checked(lengths), cost, prefixes=relatives if balance == SHARED else None)
    plan = make_plan(samples, limits, balance)
    packs = [plan.packs(rank) for rank in range(ranks)]
    if balance == SHARED:
        return [[SharedPack.of(pack, lengths, rank, plan.split) for pack in own] for rank, own in enumerate(packs)]
    return [[sizes_of(pack, lengths) for pack in own] for own in packs]


def sizes_of(pack: Sequence[Entry], lengths: Sequence[int]) -> list[int | Segment]:
    """The tokens of its samples, or segments."""
    return [replace(each, length=lengths[each.sample]) if isinstance(each, Segment) else lengths[each] for each in pack]


SCHEDULES = ("fsdp", "fsdp-no-reshard", "odc")
COMPUTE_BYTES, REDUCE_BYTES = 2, 4  # bf16 is read, fp32 is added
_KV_BYTES = 2 * COMPUTE_BYTES + REDUCE_BYTES  # of keys and values: read in forward and backward, and added to
_STEP = 30 / 4  # bytes per byte of a rank's fp32 masters: AdamW reads 16, writes 12, and 2 in bf16


@dataclass(frozen=True, kw_only=True)
class Job:
    """The machine, the model and the ranks' work, without the schedule and the balance.

    Each node holds a whole copy in shards, and gradients cross nodes once per minibatch.

    links: of the GPUs.
    seconds: of forward and backward of one microbatch, from its documents' tokens, on a rank of normal speed.
    cost: a sequence's cost assumed by balancing.
    layers: over which the seconds are spread equally.
    model: sizes of transfers and memory; None: no transfers, memory is unknown.
    checkpointing, fused_head: change memory only; with a fused head logits are never computed.
    forward_share: of the seconds, those of the forward.
    barrier_s: seconds of a barrier.
    memory_gbs: GB/s (10^9 bytes) of a GPU's memory, for the optimizer's step.
    prefetch: the next layer's parameters are fetched while one computes.
    overlap: a layer's gradients are added while the next one computes.
    slow: by rank, the slowdown of its compute.
    alone: each rank trains adapters of its own over one base, under "odc".

    Raises ValueError for `layers` that are not the model's, and for a rank that does not exist.
    """

    links: Links
    seconds: Callable[[Sequence[int]], float]
    cost: CostModel
    layers: int
    model: Model | None = None
    checkpointing: bool = True
    fused_head: bool = True
    forward_share: float = 1 / 3
    barrier_s: float = 0.0
    memory_gbs: float = math.inf
    prefetch: bool = True
    overlap: bool = True
    slow: Mapping[int, float] = field(default_factory=dict)
    alone: bool = False

    def __post_init__(self) -> None:
        if self.model is not None and self.model.layers != self.layers:
            raise ValueError(f"layers is {self.layers}, and the model has {self.model.layers}: give as many")
        for rank in self.slow:
            if not 0 <= rank < self.ranks:
                raise ValueError(f"slow names rank {rank}, but there are {self.ranks}: 0 to {self.ranks - 1}")

    @property
    def ranks(self) -> int:
        return self.links.ranks

    @property
    def replicas(self) -> int:
        """Nodes, whose ranks split sequences among themselves."""
        return self.links.nodes

    @cached_property
    def slowness(self) -> np.ndarray:
        return np.array([self.slow.get(rank, 1.0) for rank in range(self.ranks)])

    def pack_seconds(self, pack: Sequence[int | Segment]) -> float:
        """Seconds of one microbatch. A segment takes the time of its sequence up to its end, minus that up to its
        start, plus the transfers of keys, values and gradients of the tokens before it, and its pair between others.
        """
        segments = [each for each in pack if isinstance(each, Segment)]
        if not segments:
            return self.seconds(pack)
        ends = [each.stop if isinstance(each, Segment) else each for each in pack]
        starts = [each.start for each in segments if each.start]
        pairs = sum(len(each) for each in segments if each.start and each.stop < (each.length or 0))
        pairs_s = pairs * self.cost.pair / self.cost.sequence(1) * (self.seconds([1]) - self.seconds([]))
        return self.seconds(ends) - (self.seconds(starts) - self.seconds([])) + pairs_s + self.kv_seconds(pack)

    def kv_seconds(self, pack: Sequence[int | Segment]) -> float:
        """Seconds of these transfers."""
        fetched = sum(each.start for each in pack if isinstance(each, Segment))
        if isinstance(pack, SharedPack):
            fetched = pack.fetched
        gpus = self.links.gpus
        if not fetched or self.model is None or gpus == 1:
            return 0.0
        token_bytes = self.model.kv_width * _KV_BYTES
        # As a tensor over the node's GPUs, whose own part costs nothing; the rank holds none of these tokens.
        return gpus / (gpus - 1) * self.links.read_s(fetched * token_bytes)

    @cached_property
    def plans(self) -> dict[str, MemoryPlan]:
        """Plans of a GPU's memory, by schedule; empty without a model."""
        how = {"shards": self.links.gpus, "ranks": self.ranks, "checkpointing": self.checkpointing, "alone": self.alone}
        schedules = ("odc",) if self.alone else SCHEDULES
        return {each: self.model.memory(each, **how) for each in schedules} if self.model else {}

    def peak_bytes(self, schedule: str, tokens: int, split_tokens: int = 0) -> int | None:
        """A GPU's peak, with the activations of a microbatch of `tokens` tokens, and with keys and values that others
        read of `split_tokens`; None if a token's activations are unknown.
        """
        plan = self.plans.get(schedule)
        if self.model is None or plan is None or plan.activation_bytes_per_token is None:
            return None
        each = plan.activation_bytes_per_token - (self.model.logits_bytes if self.fused_head else 0)
        kv_bytes = self.model.kv_width * (COMPUTE_BYTES + REDUCE_BYTES)
        return plan.total_bytes + each * tokens + kv_bytes * split_tokens

    def tail_s(self, schedule: str) -> float:
        """The optimizer step, and ODC's transfers between nodes: gradients before it, parameters after it."""
        if self.model is None:
            return 0.0
        plan = self.plans[schedule]
        tail = plan.optimizer_state_bytes / 2 * _STEP / (1e9 * self.memory_gbs)  # as many as of masters that train
        if schedule == "odc" and not self.alone:
            summed = plan.gradient_shard_bytes
            tail += sum(map(self.links.replicas_s, (summed, summed / REDUCE_BYTES * COMPUTE_BYTES)))
        return tail
