"""What ranks tell each other before memory is allocated: that they shard the same, where they lie, what they see."""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base.errors import RanksDiffer, describe
from ..comm.grid import Grid
from ..comm.layout import Plan, first_difference
from ..comm.meeting import Meetings
from ..comm.memory.heap import SymmetricHeap
from ..comm.memory.shm import SharedMemoryHeap
from ..comm.peers import Lifelines
from ..nn.tuned import Tuned
from .backend import CpuBackend
from .default_mesh import host_name

AGREEING = "fully_shard: the same model on every rank"
PEERS = "fully_shard: GPUs that reach each other"


def open_meetings(grid: Grid, timeout: timedelta) -> Meetings:
    """Meetings in a corner of the store that only this call's ranks use: the n-th fully_shard over these ranks."""
    ranks = "-".join(str(rank) for rank in grid.ranks)
    return Meetings.in_corner(
        dist.distributed_c10d._get_default_store(),
        f"odc/{uuid.uuid5(uuid.NAMESPACE_OID, ranks).hex}",
        rank=grid.rank,
        world=grid.world,
        timeout=timeout,
    )


def show_life(meetings: Meetings, grid: Grid, heap: SymmetricHeap, token: str) -> None:
    """Has the meetings tell dead ranks from late ones, by the heap that this replica shares. Collective."""
    heap.first = grid.first
    meetings.meet("the shared heap is open", {})
    signs: SymmetricHeap | Lifelines = heap
    if grid.replicas > 1:
        signs = Lifelines(heap=heap, meetings=meetings, store=dist.distributed_c10d._get_default_store(), token=token)
        meetings.meet("the replicas are connected", {})
    meetings.signs = signs


@contextmanager
def patient_meetings(grid: Grid, timeout: timedelta) -> Iterator[Meetings]:
    """Meetings to which a rank may come as late as it likes while its process lives; who died has a name. Collective.

    For work of unknown length before there is a sharded model. `timeout` is for getting to know each other.
    """
    meetings = open_meetings(grid, timeout)
    token = meetings.meet("all ranks are here", {"token": uuid.uuid4().hex})[0]["token"]
    heap = SharedMemoryHeap(
        rank=grid.shard,
        world=grid.shards,
        size_bytes=0,
        slots=0,
        token=f"{token}-{grid.replica}",
        timeout_s=meetings.timeout_s,
    )
    try:
        show_life(meetings, grid, heap, token)
        meetings.timeout_s = math.inf
        yield meetings
    finally:
        if isinstance(meetings.signs, Lifelines):
            meetings.signs.close()
        heap.close()


def refuse(meetings: Meetings, purpose: str, error: Exception) -> None:
    """The other ranks, whose models may be fine, must not wait for this one."""
    meetings.tell(purpose, {"refused": describe(error)})


def agree(
    meetings: Meetings, grid: Grid, plan: Plan, options: dict[str, Any], device: CpuBackend
) -> tuple[str, list[str | None], list[int | None]]:
    """All ranks compare their plans; returns a secret name for the heaps, made by rank 0, and the devices of this
    replica's ranks: what they are and how each rank numbers its own.
    """
    digest, lines = plan.fingerprint(options)
    mine = {
        "token": uuid.uuid4().hex,
        "device": device.device_id(),
        "index": device.device_index(),
        "host": host_name(),
    }
    messages = meetings.meet(AGREEING, {"digest": digest, **mine})
    _raise_refusal(messages)
    different = [rank for rank, theirs in enumerate(messages) if theirs["digest"] != digest]
    disagree = len({theirs["digest"] for theirs in messages}) > 1
    if disagree:
        details = meetings.meet("fully_shard: the first difference", {"lines": lines})
        rank = (different or [0])[0]
        raise RanksDiffer(
            f"fully_shard: rank {meetings.rank} and rank {rank} differ: "
            f"{first_difference(lines, details[rank]['lines'])}. All ranks must build the same model and options."
        )
    together = messages[grid.first : grid.first + grid.shards]
    hosts = [theirs["host"] for theirs in together]
    if len(set(hosts)) > 1:
        raise RanksDiffer(
            f"fully_shard: ranks {grid.first} to {grid.first + grid.shards - 1} share memory and lie on several hosts "
            f'or in several network namespaces: {hosts}. Give a mesh ("replicate", "shard") whose second dimension '
            f"stays within a host"
        )
    return messages[0]["token"], [theirs["device"] for theirs in together], [theirs["index"] for theirs in together]


def compare_surroundings(meetings: Meetings, problem: str | None, tuned: Tuned) -> None:
    """Raises RuntimeError on all ranks, before anything is allocated, if one of them sees devices that can't be peers,
    RanksDiffer if they read different tables.

    A container may hide from one rank what another sees, so they tell each other.
    """
    messages = meetings.meet(PEERS, {"problem": problem, "tuned": tuned.digest})
    _raise_refusal(messages)
    for rank, theirs in enumerate(messages):
        if theirs["problem"] is not None:
            raise RuntimeError(f"fully_shard: rank {rank} finds that {theirs['problem']}")
    different = [rank for rank, theirs in enumerate(messages) if theirs["tuned"] != messages[0]["tuned"]]
    if different:
        raise RanksDiffer(
            f"fully_shard: ranks {different} read another tuned table than rank 0: give all the same ODC_TUNED folder, "
            f"or ODC_TUNED=off"
        )
    if tuned.unused is not None and meetings.rank == 0:
        warnings.warn(tuned.unused, stacklevel=3)


def _raise_refusal(messages: list[dict[str, Any]]) -> None:
    for rank, theirs in enumerate(messages):
        if "refused" in theirs:
            raise RanksDiffer(f"fully_shard: rank {rank} could not shard its model: {theirs['refused']}")
