"""Which packs each rank computes, or, of a queue, which there are to take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from odc_triton.balance.cost import CostModel
from odc_triton.balance.packing import checked_lengths
from odc_triton.balance.strategies import BALANCES, assign

QUEUE = "queue"
ALL_BALANCES = (*BALANCES, QUEUE)
_PACKS_PER_RANK = 16  # at least, where there are as many samples

Packs = list[list[int]]  # of one rank: per microbatch the tokens of its documents


def deal(lengths: Sequence[int], *, ranks: int, token_cap: int, balance: str, cost: CostModel) -> list[Packs]:
    """Each rank's packs in lengths, not indices. Raises as `assign`."""
    dealt = assign(lengths, ranks=ranks, token_cap=token_cap, balance=balance, cost=cost)
    return [[[lengths[i] for i in members] for members in packs] for packs in dealt]


def queue_packs(lengths: Sequence[int], *, ranks: int, token_cap: int, cost: CostModel) -> Packs:
    """Packs to be taken at run time, dearest first.

    A sample stands alone, unless it costs less than a sixteenth of a rank's part: small ones share a pack up to that.
    The last packs to be taken decide how evenly ranks end, and packs of equal cost, as LB-Mini likes them, are the
    worst for that: ranks then differ by a whole one. Raises ValueError as `assign`.
    """
    lengths = checked_lengths(lengths, token_cap)
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: give the number of ranks, 1 or more")
    order = sorted(lengths, reverse=True)
    if len(order) <= _PACKS_PER_RANK * ranks:
        return [[length] for length in order]
    most = math.fsum(map(cost.sequence, order)) / (_PACKS_PER_RANK * ranks)
    packs: Packs = []
    spent, tokens = math.inf, 0
    for length in order:
        price = cost.sequence(length)
        if spent + price > most or tokens + length > token_cap:
            packs.append([])
            spent, tokens = 0.0, 0
        packs[-1].append(length)
        spent, tokens = spent + price, tokens + length
    return sorted(packs, key=cost.pack, reverse=True)
