"""Which packs each rank computes, or, of a queue, which there are to take."""

from __future__ import annotations

from collections.abc import Sequence

from ..balance.cost import CostModel
from ..balance.queue import QUEUE
from ..balance.queue import queue_packs as balance_queue_packs
from ..balance.strategies import BALANCES, assign

ALL_BALANCES = (*BALANCES, QUEUE)

Packs = list[list[int]]  # of one rank: per microbatch the tokens of its documents


def deal(lengths: Sequence[int], *, ranks: int, token_cap: int, balance: str, cost: CostModel) -> list[Packs]:
    """Each rank's packs in lengths, not indices. Raises as `assign`."""
    dealt = assign(lengths, ranks=ranks, token_cap=token_cap, balance=balance, cost=cost)
    return [[[lengths[i] for i in members] for members in packs] for packs in dealt]


def queue_packs(lengths: Sequence[int], *, ranks: int, token_cap: int, cost: CostModel) -> Packs:
    """Packs to be taken at run time, in lengths, in the order of `balance.queue_packs`. Raises as that."""
    packs = balance_queue_packs(lengths, ranks=ranks, token_cap=token_cap, cost=cost)
    return [[lengths[i] for i in members] for members in packs]
