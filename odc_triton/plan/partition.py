"""Partition of costs into groups of nearly equal sums: longest first, and refinement."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

# A group within this fraction of the mean is not refined: far below the error of a cost model.
BALANCED = 1e-3
# Exchanges evaluated in one step of `refine`; beyond it, only some of the heaviest group's items are tried.
_EXCHANGES = 4_000_000
# Groups whose items are tried first where there are many.
_LIGHTEST = 32


def balanced_partition(costs: Sequence[float], groups: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Partitions the indices of `costs` into `groups` lists of nearly equal sums: `longest_first`, then `refine`.

    With `equal_sizes` the lists' sizes differ by at most one; otherwise lists may be empty. Every index is in
    exactly one list. The same costs give the same lists on every rank, and in any order the same sums. (Karmarkar and
    Karp's differencing is better before the refinement, and no better after it.)

    Raises ValueError for empty `costs`, a cost that is negative or not finite, `groups` below 1.
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    costs = [costs[i] for i in order]
    split = refine(longest_first(costs, groups, equal=len(costs) * equal_sizes), costs, equal_sizes=equal_sizes)
    return [sorted(order[i] for i in group) for group in split]


def longest_first(costs: Sequence[float], groups: int, *, equal: int = 0) -> list[list[int]]:
    """Assigns each item, longest first, to the lightest group (Graham 1969); the first `equal` in rounds of one item
    per group. Raises as `balanced_partition`.
    """
    _check(costs, groups)
    split: list[list[int]] = [[] for _ in range(groups)]
    lightest = [(0.0, group) for group in range(groups)]
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    for start, stop in pairwise([*range(0, equal, groups), *range(equal, len(order) + 1)]):
        items = order[start:stop]
        for item, (load, group) in zip(items, [heapq.heappop(lightest) for _ in items], strict=True):
            split[group].append(item)
            heapq.heappush(lightest, (load + costs[item], group))
    return split


def refine(
    groups: Sequence[Sequence[int]],
    costs: Sequence[float],
    *,
    equal_sizes: bool = False,
    tokens: Sequence[int] | None = None,
    token_cap: int | None = None,
) -> list[list[int]]:
    """Moves and swaps items between `groups` until no single exchange makes the heaviest group lighter.

    Each step takes the best exchange between the heaviest group and any other (of many groups: one of the lightest, if
    possible) that leaves both below the heaviest's former sum. A group without one is settled, and the next heaviest is
    tried. So the largest sum never grows, no group that had an item becomes empty, and the sums below the largest are
    balanced too.

    groups: lists of indices into `costs`.
    costs: of each item.
    equal_sizes: keeps the multiset of sizes.
    tokens, token_cap: the items' tokens, of which no group gets more.
    """
    count, items = len(groups), len(costs)
    if max(map(len, groups)) < 2:  # exchanging single items makes the heaviest group no lighter
        return [list(members) for members in groups]
    import numpy as np  # here, as --help imports this file for the strategies' names

    tokens, cap = ([0] * items, 0) if tokens is None or token_cap is None else (tokens, token_cap)
    load = np.array([math.fsum(costs[i] for i in members) for members in groups])
    if load.max() <= load.mean() * (1 + BALANCED):
        return [sorted(members) for members in groups]
    # Each group also has a hole of no cost and no tokens: swapping an item with it moves the item.
    cost = np.concatenate([np.asarray(costs, dtype=np.float64), np.zeros(count)])
    group = np.arange(-items, count)
    for index, members in enumerate(groups):
        group[list(members)] = index
    size = np.array([len(members) for members in groups])
    weight = np.concatenate([np.asarray(tokens, dtype=np.int64), np.zeros(count, dtype=np.int64)])
    weights = np.array([sum(tokens[i] for i in members) for members in groups])
    everything = np.arange(len(cost))

    def near(load: np.ndarray) -> np.ndarray:
        """Items and holes of the lightest groups, the most likely good exchanges."""
        light = np.zeros(count, dtype=bool)
        light[np.argpartition(load, _LIGHTEST)[:_LIGHTEST]] = True
        return np.flatnonzero(light[group])

    def search(heavy: int, partners: np.ndarray) -> tuple[int, int]:
        """The best exchange of an item of `heavy` with one of `partners`; (-1, -1) if none makes it lighter."""
        mine = np.flatnonzero(group[:items] == heavy)
        mine = mine[:: 1 + len(mine) * len(partners) // _EXCHANGES]
        theirs = group[partners]
        lost = cost[mine, None] - cost[None, partners]  # [mine, theirs]: what the heavy group loses, the other gains
        after = np.maximum(load[heavy] - lost, load[theirs] + lost)
        refused = theirs == heavy
        if equal_sizes:
            refused |= (partners >= items) & (size[theirs] >= size[heavy])
        after[:, refused] = np.inf
        out = weight[mine, None] - weight[None, partners]
        after[(weights[theirs] + out > cap) | (weights[heavy] - out > cap)] = np.inf
        best = int(after.argmin()) if after.size else 0
        # The margin, above rounding, makes every exchange a true descent: the loop ends.
        if not after.size or after.flat[best] >= load[heavy] * (1 - 1e-9):
            return -1, -1
        return int(mine[best // len(partners)]), int(partners[best % len(partners)])

    unsettled = np.ones(count, dtype=bool)
    while unsettled.any():
        heavy = int(np.where(unsettled, load, -1.0).argmax())
        if load[heavy] <= load[unsettled].mean() * (1 + BALANCED):
            break
        if size[heavy] == 1:  # any group that takes its item ends up no lighter
            unsettled[heavy] = False
            continue
        give, take = search(heavy, near(load)) if count > 4 * _LIGHTEST else (-1, -1)
        if give < 0:
            give, take = search(heavy, everything)
        if give < 0:
            unsettled[heavy] = False
            continue
        other = int(group[take])
        for sums, of in ((load, cost), (weights, weight)):
            sums[heavy] -= of[give] - of[take]
            sums[other] += of[give] - of[take]
        group[give] = other
        if take < items:
            group[take] = heavy
        else:
            size[heavy] -= 1
            size[other] += 1
    refined: list[list[int]] = [[] for _ in range(count)]
    for item, index in enumerate(group[:items].tolist()):
        refined[index].append(item)
    return refined


def _check(costs: Sequence[float], groups: int) -> None:
    if len(costs) == 0:
        raise ValueError("balanced_partition: there are no costs; give at least one item")
    if groups < 1:
        raise ValueError(f"balanced_partition: {groups} groups; give 1 or more")
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"balanced_partition: costs[{index}] is {cost}; a cost is finite and 0 or more")
