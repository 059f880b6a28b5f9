"""Strategies to assign a minibatch's samples to ranks and microbatches.

| name   | assigned to ranks by         | microbatches                     | made for     |
|--------|------------------------------|----------------------------------|--------------|
| local  | position                     | one sample each, sorted          | reference    |
| micro  | cost, equal sample counts    | equal count, heavy ones lined up | FSDP         |
| global | pack, after packing them all | equal count, heavy ones lined up | FSDP, better |
| mini   | cost                         | as many as the rank needs, or 0  | ODC          |

A fifth, "queue" (queue.py), assigns packs at run time. docs/architecture.md says how to add one.

LocalSort, LB-Micro and LB-Mini are those of arXiv 2601.19362. FSDP waits for the slowest rank in every layer
of every microbatch, so it needs equal counts and microbatches of equal cost at each index; ODC waits once per
minibatch, so only the rank's total counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .packing import best_fit, packed
from .partition import balanced_partition
from .queue import QUEUE, Packs


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a value of `balance` stands for. `summary`: of it, for `--help`. It has one of the two functions; with
    neither, ranks take packs at run time.

    parts: each rank's samples, from costs and the number of ranks, for any number of samples. A rank packs its own.
    packs: all ranks' packs, from lengths, costs, ranks and token cap.
    uneven: ranks may get different numbers of samples and packs, which FSDP can't run; so any number of samples works.
    splits: `make_plan` also splits samples with it.
    """

    summary: str
    parts: Callable[[list[float], int], list[list[int]]] | None = None
    packs: Callable[[list[int], list[float], int, int], list[Packs]] | None = None
    uneven: bool = False
    splits: bool = False


def _local_sort(lengths: list[int], costs: list[float], ranks: int, token_cap: int) -> list[Packs]:
    """LocalSort: rank r keeps the r-th run of samples, costliest first, one a microbatch.

    The runs' sizes, hence the numbers of microbatches, are equal if `ranks` divides the samples and differ
    by one otherwise (FSDP would then hang).
    """
    runs = [range(len(lengths) * r // ranks, len(lengths) * (r + 1) // ranks) for r in range(ranks)]
    return [[[i] for i in sorted(run, key=lambda i: -costs[i])] for run in runs]


def _lb_micro(lengths: list[int], costs: list[float], ranks: int, token_cap: int) -> list[Packs]:
    """LB-Micro: equal sample counts per rank balanced by cost, the same number of packs on every rank.

    The number is that of the rank that needs most; the others divide packs to reach it. Each rank's packs have
    nearly equal cost and come costliest first, so that heavy ones line up over the ranks.

    Raises ValueError if a rank has fewer samples than that number. This cannot happen if `ranks` divides the
    number of samples.
    """
    owned = balanced_partition(costs, ranks, equal_sizes=True)
    own_lengths = [[lengths[i] for i in members] for members in owned]
    needed = max(len(best_fit(own, token_cap)) for own in own_lengths if own)
    fewest = min(map(len, owned))
    if fewest < needed:
        raise ValueError(
            f"balance 'micro': {len(lengths)} samples over {ranks} ranks leave a rank with {fewest}, but "
            f"every rank needs {needed} microbatches under a token_cap of {token_cap}; give a multiple "
            f"of {ranks} samples, or use balance 'mini'"
        )
    return [_packed(members, lengths, costs, token_cap, needed) for members in owned]


def _global_packing(lengths: list[int], costs: list[float], ranks: int, token_cap: int) -> list[Packs]:
    """Global packing: all samples packed together, packs sorted by cost, each `ranks` of them one microbatch.

    The number of packs is raised to a multiple of `ranks` by dividing packs. Every second group is assigned in
    reverse order, which changes nothing under FSDP's barriers and balances the ranks' totals without them.

    Raises ValueError if there are fewer samples than packs. This cannot happen if `ranks` divides the number of
    samples.
    """
    fewest = len(best_fit(lengths, token_cap))
    needed = -(-fewest // ranks) * ranks
    if needed > len(lengths):
        raise ValueError(
            f"balance 'global': {len(lengths)} samples cannot make {needed} packs ({fewest} under a "
            f"token_cap of {token_cap}, raised to a multiple of {ranks} ranks); give a multiple of {ranks} "
            "samples, or use balance 'mini'"
        )
    packs = packed(lengths, costs, token_cap, needed)
    assigned: list[Packs] = [[] for _ in range(ranks)]
    for start in range(0, needed, ranks):
        group = packs[start : start + ranks]
        for rank, members in enumerate(group if start // ranks % 2 == 0 else reversed(group)):
            assigned[rank].append(members)
    return assigned


STRATEGIES = {
    "mini": Strategy(
        summary="equal work, in as many packs as each rank needs", parts=balanced_partition, uneven=True, splits=True
    ),
    QUEUE: Strategy(
        summary="smaller packs, taken at run time, for ranks that are not equally fast", uneven=True, splits=True
    ),
    "micro": Strategy(summary="equally many samples and packs per rank, as FSDP needs", packs=_lb_micro),
    "global": Strategy(summary="equally many packs per rank, of similar cost, as FSDP needs", packs=_global_packing),
    "local": Strategy(summary="equally many samples per rank, one per pack, as FSDP needs", packs=_local_sort),
}
BALANCES = tuple(name for name, each in STRATEGIES.items() if each.parts or each.packs)  # those of `assign`
UNEVEN = tuple(name for name, strategy in STRATEGIES.items() if strategy.uneven)
SPLITTING = tuple(name for name, strategy in STRATEGIES.items() if strategy.splits)


def _packed(members: list[int], lengths: list[int], costs: list[float], token_cap: int, count: int) -> Packs:
    """One rank's samples in `count` packs."""
    packs = packed([lengths[i] for i in members], [costs[i] for i in members], token_cap, count)
    return [[members[i] for i in local] for local in packs]
