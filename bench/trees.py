"""Samples that share prefixes, assigned to ranks in three ways, which are compared."""

from __future__ import annotations

from collections.abc import Sequence

from odc_triton.balance import CostModel
from odc_triton.plan import planner
from odc_triton.plan.partition import balanced_partition
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.plan.planner import make_plan
from odc_triton.plan.relatives import Relatives
from odc_triton.plan.samples import Limits, Samples

TREES, REPEATED, SHARED = "trees", "repeated", "shared"
WAYS = (TREES, REPEATED, SHARED)  # each prefix group on one rank; the best that reads nothing of other ranks; the best


def shared_tokens(relatives: Relatives) -> int:
    """The most tokens of each rank that others may read: all that are shared, and as many of branches."""
    return 2 * sum(max(strip.start for strip in family) for family in relatives.families())


def assign_trees(
    way: str, lengths: Sequence[int], relatives: Relatives, *, ranks: int, token_cap: int, cost: CostModel
) -> list[MinibatchPacks]:
    """Every rank's packs of samples of `lengths` tokens, with the plan of what ranks read of each other, if they do."""
    how = {"ranks": ranks, "token_cap": token_cap, "cost": cost}
    if way == TREES:
        return _tree_per_rank(lengths, relatives, **how)
    limits = Limits(ranks=ranks, token_cap=token_cap, split_tokens=shared_tokens(relatives) if way == SHARED else 0)
    plan = make_plan(Samples.of(limits.checked(lengths), cost, prefixes=relatives), limits, planner.SHARED)
    return [plan.packs(rank) for rank in range(ranks)]


def _tree_per_rank(
    lengths: Sequence[int], relatives: Relatives, *, ranks: int, token_cap: int, cost: CostModel
) -> list[MinibatchPacks]:
    """A family is one pack, or, if that exceeds the cap, as few as hold it, which repeat what they share."""
    packs, costs = [], []
    for family in relatives.families():
        room = 0
        for sample, start, *_ in family:
            if lengths[sample] - start > room:
                packs.append([])
                costs.append(cost.microbatch)
                room, start = token_cap, 0
            room -= lengths[sample] - start
            packs[-1].append(sample)
            costs[-1] += cost.segment(start, lengths[sample])
    return [
        MinibatchPacks(relatives.entries(packs[at]) for at in sorted(own, key=lambda at: -costs[at]))
        for own in balanced_partition(costs, ranks)
    ]
