"""Packs: documents laid end to end under a token cap, one pack a microbatch."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Sequence

from .cost import CostModel
from .partition import balanced_partition, refine


def checked_lengths(lengths: Sequence[int], token_cap: int, *, ranks: int = 1) -> list[int]:
    """`lengths` (a list, array or tensor of integers, in tokens) as a list of int, each in 1..`token_cap` on each of
    the `ranks` that a sample may be split over.

    Raises ValueError for empty lengths, for a cap below 1, and naming index, length and cap otherwise.
    """
    if not token_cap >= 1:  # NaN too
        raise ValueError(f"token_cap is {token_cap}: give the most tokens that one microbatch may hold, 1 or more")
    try:
        checked = [operator.index(length) for length in lengths]
    except TypeError as error:
        raise ValueError(f"lengths must be whole numbers of tokens: {error}") from None
    if not checked:
        raise ValueError("lengths is empty: give the number of tokens of at least one sample")
    for index, length in enumerate(checked):
        if length < 1:
            raise ValueError(f"lengths[{index}] is {length}: drop samples without tokens, every length is 1 or more")
        if length > token_cap * ranks:
            many = f"{token_cap * ranks} of {ranks} ranks that share memory, each with a " if ranks > 1 else ""
            raise ValueError(
                f"lengths[{index}] is {length} tokens, over the {many}token_cap of {token_cap}: "
                "raise the cap, or truncate or drop the sample"
            )
    return checked


def best_fit_decreasing(lengths: Sequence[int], *, token_cap: int) -> list[list[int]]:
    """Indices of `lengths` in few packs of at most `token_cap` tokens (at most 11/9 of the fewest, plus 1).

    Longest first, each into the fullest pack with enough free tokens. Raises ValueError for lengths below 1 or over the
    cap.
    """
    return best_fit(checked_lengths(lengths, token_cap), token_cap)


def best_fit(lengths: Sequence[int], token_cap: int) -> list[list[int]]:
    """`best_fit_decreasing` of lengths that were checked."""
    packs: list[list[int]] = []
    free_packs: list[tuple[int, int]] = []  # (free tokens, index of pack), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(free_packs, (lengths[index], -1))
        if place < len(free_packs):
            free, chosen = free_packs.pop(place)
            packs[chosen].append(index)
        else:
            free, chosen = token_cap, len(packs)
            packs.append([index])
        bisect.insort(free_packs, (free - lengths[index], chosen))
    return packs


def pack(
    lengths: Sequence[int], *, token_cap: int, cost: CostModel | Sequence[float], count: int | None = None
) -> list[list[int]]:
    """Indices of `lengths` in `count` packs of at most `token_cap` tokens, nearly equal in cost, costliest first.

    cost: a model of it, or the cost of each sample.
    count: None means as few as best-fit decreasing needs; a larger one is reached by dividing packs, and no pack is
        empty.

    Raises ValueError for lengths below 1 or over the cap, and if `count` packs are too few for the tokens or more than
    the samples.
    """
    lengths = checked_lengths(lengths, token_cap)
    return packed(lengths, cost.samples(lengths) if isinstance(cost, CostModel) else cost, token_cap, count)


def packed(lengths: Sequence[int], costs: Sequence[float], token_cap: int, count: int | None = None) -> list[list[int]]:
    """`pack` of samples that were checked and priced."""
    packs = best_fit(lengths, token_cap)
    count = len(packs) if count is None else count
    if not len(packs) <= count <= len(lengths):
        raise ValueError(
            f"count is {count}: {len(lengths)} samples under a token_cap of {token_cap} make "
            f"from {len(packs)} to {len(lengths)} packs"
        )

    def of_pack(members: list[int]) -> float:
        return sum(costs[i] for i in members)

    waiting = [(-of_pack(members), place, members) for place, members in enumerate(packs)]  # `place` breaks ties
    heapq.heapify(waiting)
    done, place = [], len(packs)
    while len(done) + len(waiting) < count:
        _, _, dearest = heapq.heappop(waiting)
        if len(dearest) == 1:
            done.append(dearest)
            continue
        for half in balanced_partition([costs[i] for i in dearest], 2):
            members = [dearest[i] for i in half]
            heapq.heappush(waiting, (-of_pack(members), place, members))
            place += 1
    packs = done + [members for _, _, members in sorted(waiting, key=lambda entry: entry[1])]
    packs = refine(packs, costs, tokens=lengths, token_cap=token_cap)
    return sorted(packs, key=of_pack, reverse=True)
