"""Ranks follow what others show that they wait for, to the one that stands still: wherever it does, and whatever it
has shown last.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from odc_triton.comm.barrier import Barrier
from odc_triton.comm.memory.heap import STATUS_SLOTS, StatusBoard
from odc_triton.plan.entries import Segment
from odc_triton.sequence.sync import OwnFlag, ShownWaits, Wait
from tests.sequence.test_walk import recorded

LAYERS, FIRST = 3, 3  # the first rank of the replica that computes segments


class Board(StatusBoard):
    """Of all ranks, in this process. `rank`: whose status `show` sets."""

    def __init__(self, world: int) -> None:
        self.rank, self.status = 0, [[0] * STATUS_SLOTS for _ in range(world)]

    def show(self, slot: int, value: int) -> None:
        self.status[self.rank][slot] = value

    def seen(self, slot: int) -> list[int]:
        return [status[slot] for status in self.status]

    def is_alive(self, rank: int) -> bool:
        return True


# By sample, the ranks of its segments in their order.
DEALS = [
    [[0, 1]],
    [[2, 0, 1]],
    [[0, 1, 2, 3]],
    [[3, 0, 2, 1]],
    [[0, 1, 0, 2, 1]],
    [[0, 1], [1, 0]],
    [[0, 1, 2], [2, 1, 3], [3, 0]],
]


@pytest.mark.parametrize(("in_order", "in_flight"), [(False, LAYERS), (True, 2), (False, 1)])
@pytest.mark.parametrize("deal", DEALS, ids=str)
def test_the_rank_that_stands_still_is_found(deal: list[list[int]], in_order: bool, in_flight: int) -> None:
    """It stops at any place, perhaps while it shows a wait that is over afterwards; others go as far as they can. A
    rank of another replica, at the exit, blames that rank alone.
    """
    world = 1 + max(map(max, deal))
    dealt: list[list[Segment]] = [[] for _ in range(world)]
    for sample, owners in enumerate(deal):
        for at, rank in enumerate(owners):
            dealt[rank].append(Segment(sample, at, at + 1))
    found = recorded([[segments] for segments in dealt], LAYERS, in_order=in_order, in_flight=in_flight)
    programs = [[each if isinstance(each, Wait) else each[0] for each in done] for done in found]
    for victim, first_or_last in product(range(world), (min, max)):
        for stops_at, last in enumerate(programs[victim]):
            for shown in last.whom if isinstance(last, Wait) and last.whom else (None,):
                found = _root_cause(programs, victim, stops_at, shown, first_or_last)
                assert found == [FIRST + victim], (victim, last, shown, first_or_last)


def _root_cause(
    programs: list[list[OwnFlag | Wait]],
    victim: int,
    stops_at: int,
    shown: int | None,
    first_or_last: Callable[[list[int]], int],
) -> list[int]:
    """What a rank of another replica finds. `shown`: for whom the victim shows that it waits; `first_or_last`: for
    which of late ranks others do.
    """
    world = len(programs)
    board, barrier = Board(FIRST + world), Barrier(store=dist.HashStore(), rank=0, world=FIRST + world, timeout_s=1.0)
    barrier.watch(board)
    waits = ShownWaits(SimpleNamespace(layers=LAYERS, heap=SimpleNamespace(first=FIRST)), barrier)
    places, signals = [0] * world, set()

    def late(step: Wait) -> list[int]:
        return [peer for peer in step.whom if (peer, (step.flag, step.layer, step.epoch)) not in signals]

    def goes_on(rank: int) -> bool:
        """One step of a rank, if it can."""
        if places[rank] == len(programs[rank]) or (rank == victim and places[rank] == stops_at):
            return False
        step = programs[rank][places[rank]]
        if not isinstance(step, Wait):
            signals.add((rank, step))
        elif late(step):
            return False
        places[rank] += 1
        return True

    def shows(rank: int, step: Wait, writer: int) -> None:
        board.rank, waits._shown = FIRST + rank, 0
        waits.show(step, writer=writer)

    while any(goes_on(rank) for rank in range(world)):
        pass
    if shown is not None:
        shows(victim, programs[victim][stops_at], shown)
    for rank in range(world):
        if rank != victim and places[rank] < len(programs[rank]):
            step = programs[rank][places[rank]]
            shows(rank, step, first_or_last(late(step)))
    for rank in range(FIRST + world):
        board.rank = rank
        arrived = rank < FIRST or places[rank - FIRST] == len(programs[rank - FIRST])
        barrier._reached.show(1 + arrived)
    barrier.passed = 1
    return barrier.root_cause([rank for rank, reached in enumerate(barrier._reached.seen()) if reached == 1])
