"""Agreement of the ranks before memory is allocated: on the model, the hosts and the devices.

`default_mesh`: one dimension on one host, a replica per host on several.
"""

from __future__ import annotations

import os
import platform
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ..base.deadlines import Timeout, timedelta_of
from ..base.errors import DeadlineExceeded, RankLost, RanksDiffer, describe
from ..comm.barrier import Barrier
from ..comm.grid import Grid
from ..comm.layout import MemoryLayout, first_difference
from ..comm.memory.heap import SharedMemoryHeap, SymmetricHeap
from ..comm.peers import PeerStatus
from ..comm.process_group import start_process_group, take_gpu
from ..nn.operand import ReadsTables
from .backend import Backend, backend_of

if TYPE_CHECKING:
    from ..nn.tuned import Tuned

AGREEING = "the same model on every rank"
_PEERS = "GPUs that reach each other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """The ranks' knowledge of each other once their plans agree. `token`: a secret name for heaps, made by rank 0.

    `devices`: of this replica's ranks, by `device_id`; `indices`: these devices' numbers in each rank's process.
    `tuned`: what all of them read of how operators run; None if no layer asks.
    """

    token: str
    devices: list[str | None]
    indices: list[int | None]
    tuned: Tuned | None


def require_module(module: object, call: str) -> None:
    """Raises OSError where ranks can't share memory, TypeError for what is no module. `call`: who asks."""
    if sys.platform != "linux":
        raise OSError(f"odc-triton shares memory between ranks by Linux's memfd and does not run on {sys.platform}")
    if not isinstance(module, nn.Module):
        raise TypeError(f"{call} takes an nn.Module, not a {type(module).__name__}")


def open_barrier(grid: Grid, timeout: timedelta) -> Barrier:
    """A barrier of its own for this call: the n-th fully_shard over these ranks."""
    ranks = "-".join(str(rank) for rank in grid.ranks)
    return Barrier.under_prefix(
        distributed_c10d._get_default_store(),
        f"odc/{uuid.uuid5(uuid.NAMESPACE_OID, ranks).hex}",
        rank=grid.rank,
        ranks=grid.ranks,
        timeout=timeout,
    )


def look_for(barrier: Barrier, first: int, purpose: str, ranks: list[int]) -> None:
    """Raises RankLost if one of `ranks`, counted from their replica's `first` on, is gone."""
    ranks = [first + rank for rank in ranks]
    barrier.require_alive(ranks, purpose, lambda: ranks)


def _show_life(barrier: Barrier, grid: Grid, heap: SymmetricHeap, token: str) -> None:
    """Lets the barrier separate dead ranks from late ones, by the heap that this replica shares. Collective."""
    heap.first = grid.first
    barrier.exchange("the shared heap is open", {})
    board: SymmetricHeap | PeerStatus = heap
    if grid.replicas > 1:
        board = PeerStatus(heap=heap, barrier=barrier, store=distributed_c10d._get_default_store(), token=token)
        barrier.exchange("the replicas are connected", {})
    barrier.watch(board)


@contextmanager
def watched_barrier(grid: Grid, timeout: timedelta) -> Iterator[Barrier]:
    """A barrier for use before there is a model: it names a rank that died, or stopped while `working`. Collective."""
    barrier = open_barrier(grid, timeout)
    token = barrier.exchange("all ranks are here", {"token": uuid.uuid4().hex})[0]["token"]
    heap = SharedMemoryHeap(
        rank=grid.shard,
        world=grid.shards,
        token=f"{token}-{grid.replica}",
        timeout_s=barrier.timeout_s,
        look=partial(look_for, barrier, grid.first, "the shared heap"),
    )
    try:
        _show_life(barrier, grid, heap, token)
        yield barrier
    finally:
        if isinstance(barrier.board, PeerStatus):
            barrier.board.close()
        heap.close()


def open_heap(barrier: Barrier, grid: Grid, device: Backend, plan: MemoryLayout, agreed: Agreed) -> SymmetricHeap:
    """The memory of `plan` that this replica's ranks share; from then on the barrier knows who is alive. Collective."""
    devices = agreed.devices
    heap = device.open_heap(
        plan,
        grid.shard_mesh,
        token=f"{agreed.token}-{grid.replica}",
        timeout_s=barrier.timeout_s,
        look=partial(look_for, barrier, grid.first, "the shared heap"),
        shared=min(len(set(devices)), len(set(agreed.indices))) < len(devices),
    )
    heap.near = frozenset(rank for rank, theirs in enumerate(devices) if theirs == devices[heap.rank])
    _show_life(barrier, grid, heap, agreed.token)
    return heap


@contextmanager
def refusing(barrier: Barrier, purpose: str, *, call: str = "fully_shard") -> Iterator[None]:
    """Around work before the barrier `purpose` of `call`: the ranks that wait there raise RanksDiffer for an error."""
    try:
        yield
    except (RankLost, DeadlineExceeded):  # of a barrier within: peers see it for themselves
        raise
    except Exception as error:
        refused = f"{call}: rank {barrier.rank} could not shard its model: {describe(error)}"
        barrier.post(f"{call}: {purpose}", {"refused": refused})
        raise


def agree(
    barrier: Barrier,
    grid: Grid,
    plan: MemoryLayout,
    options: dict[str, Any],
    device: Backend,
    *,
    reader: ReadsTables | None = None,
    call: str = "fully_shard",
) -> Agreed:
    """All ranks compare plans, options, devices and what `reader` reads. `call`: who asks, for messages. Collective.

    Raises, on all ranks: RanksDiffer with the first difference, RuntimeError for devices that can't be peers. A
    container may hide from one rank what another sees, so each rank looks at the devices itself.
    """
    digest, lines = plan.fingerprint({name: str(value) for name, value in options.items()})
    mine = {"token": uuid.uuid4().hex, "device": device.device_id(), "index": device.device_index()}
    messages = barrier.exchange(f"{call}: {AGREEING}", {"digest": digest, "host": host_name(), **mine})
    if len({theirs["digest"] for theirs in messages}) > 1:
        details = barrier.exchange(f"{call}: the first difference", {"lines": lines})
        rank = next((rank for rank, theirs in enumerate(messages) if theirs["digest"] != digest), 0)
        raise RanksDiffer(
            f"{call}: rank {barrier.rank} and rank {rank} differ: "
            f"{first_difference(lines, details[rank]['lines'])}. All ranks must build the same model and options."
        )
    together = messages[grid.first : grid.first + grid.shards]
    instead = 'Give a mesh ("replicate", "shard") whose second dimension stays within a host'
    _require_one_host([theirs["host"] for theirs in together], grid.first, instead, call=call)
    devices = [theirs["device"] for theirs in together]
    with refusing(barrier, _PEERS, call=call):
        problem = device.unusable_peers(devices)
        tuned = None if reader is None else reader.tuned_tables(device.place(devices))
    digest = "" if tuned is None else tuned.digest
    found = barrier.exchange(f"{call}: {_PEERS}", {"problem": problem, "tuned": digest})
    for rank, theirs in enumerate(found):
        if theirs["problem"] is not None:
            raise RuntimeError(f"{call}: rank {rank} finds that {theirs['problem']}")
    if different := [rank for rank, theirs in enumerate(found) if theirs["tuned"] != found[0]["tuned"]]:
        raise RanksDiffer(
            f"{call}: ranks {different} and rank 0 read different tuned tables: give all ranks the same ODC_TUNED "
            f"folder, or ODC_TUNED=off"
        )
    indices = [theirs["index"] for theirs in together]
    return Agreed(token=messages[0]["token"], devices=devices, indices=indices, tuned=tuned)


_DIMENSIONS = ("replicate", "shard")
_TAG = "odc"


def default_mesh(timeout: Timeout, backend: str = "auto", *, replicas: int | None = None) -> DeviceMesh:
    """All ranks, in `replicas` groups that each hold the model once; by default one group per host. Collective.

    One-dimensional for one replica, else ("replicate", "shard"). Without a process group it starts torchrun's, or else
    a world of one, with `timeout`, a timedelta or seconds. An existing group is used as it is: `init_device_mesh` would
    add another group to gloo's where there are GPUs.

    Raises ValueError if the ranks can't be split into that many, RanksDiffer if they are unevenly spread over hosts, or
    a replica over several.
    """
    timeout = timedelta_of(timeout)
    chosen = backend_of(backend, None)
    if not dist.is_initialized():
        start_process_group(timeout, chosen.device_id if chosen.mesh_device == "cuda" else None)
    elif chosen.mesh_device == "cuda":
        take_gpu()
    hosts, world = _hosts(timeout), dist.get_world_size()
    if replicas is None:
        replicas = even_hosts(hosts)
    if replicas < 1 or world % replicas:
        raise ValueError(f"{world} ranks can't be split into {replicas} equal replicas: give a divisor of {world}")
    for first in range(0, world, shards := world // replicas):
        _require_one_host(hosts[first : first + shards], first, "Give more replicas, by default one for each host")
    if replicas == 1:
        return DeviceMesh.from_group(distributed_c10d._get_default_group(), chosen.mesh_device)
    ranks = torch.arange(world).view(replicas, -1)
    replica, shard = divmod(dist.get_rank(), ranks.shape[1])
    # All ranks create their groups in this order, so they can't deadlock.
    groups = [_group(ranks[:, shard].tolist(), timeout), _group(ranks[replica].tolist(), timeout)]
    return DeviceMesh.from_group(groups, chosen.mesh_device, mesh=ranks, mesh_dim_names=_DIMENSIONS)


def own_mesh(ranks: Sequence[int], timeout: Timeout = timedelta(minutes=30), backend: str = "auto") -> DeviceMesh:
    """A mesh of some of the job's ranks, which train a model of their own: `fully_shard(model, mesh=…, base=…)`.

    Collective over `ranks`, this one among them, and over no others.

    ranks: their numbers in the job, each once.
    timeout, backend: as in `fully_shard`.

    Returns the mesh, of one dimension. Raises ValueError for other numbers.
    """
    if not dist.is_initialized():
        default_mesh(timeout, backend)
    numbers, world, rank = sorted({*ranks}), dist.get_world_size(), dist.get_rank()
    if not numbers or len(numbers) != len(ranks) or not 0 <= numbers[0] <= numbers[-1] < world:
        raise ValueError(f"ranks is {list(ranks)}; give different numbers from 0 to {world - 1}")
    if rank not in numbers:
        raise ValueError(f"own_mesh was given ranks {numbers} on rank {rank}: give each rank those that it trains with")
    try:
        group = _group(numbers, timedelta_of(timeout))
    except dist.DistStoreError as error:
        others = [each for each in numbers if each != rank]
        raise DeadlineExceeded(others, f"rank {rank}: not all of ranks {others} called own_mesh({numbers})") from error
    return DeviceMesh.from_group(group, backend_of(backend, None).mesh_device)


def host_name() -> str:
    """Names where ranks can share memory: their host and network namespace, as they find each other by an abstract
    socket in it. The only rule about it; ODC_HOST stands in for it, to try several hosts on one.
    """
    if name := os.environ.get("ODC_HOST"):
        return name
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} ({boot}, {os.readlink('/proc/self/ns/net')})"


def even_hosts(hosts: Sequence[str]) -> int:
    """The number of hosts. Raises RanksDiffer unless all have the same number of ranks, numbered consecutively."""
    runs = [(name, len(list(ranks))) for name, ranks in groupby(hosts)]
    counts = [count for _, count in runs]
    if len(set(counts)) > 1 or len({name for name, _ in runs}) < len(runs):
        raise RanksDiffer(
            f"the ranks are on several hosts, in order {counts}: replicas need equally many ranks on each host, "
            f"numbered host by host, as torchrun --nnodes numbers them"
        )
    return len(runs)


def _require_one_host(hosts: Sequence[str], first: int, instead: str, *, call: str = "default_mesh") -> None:
    """`hosts`: of consecutive ranks from `first` on, which share memory."""
    if len(set(hosts)) > 1:
        raise RanksDiffer(
            f"{call}: ranks {first} to {first + len(hosts) - 1} must share memory but are on several hosts or in "
            f"several network namespaces: {hosts}. {instead}"
        )


def _hosts(timeout: timedelta) -> list[str]:
    """Each rank's host. Collective."""
    ranks = range(dist.get_world_size())
    if len(ranks) == 1:
        return [host_name()]
    store = distributed_c10d._get_default_store()
    barrier = Barrier.under_prefix(store, "odc/hosts", rank=dist.get_rank(), ranks=ranks, timeout=timeout)
    messages = barrier.exchange("finding each rank's host", {"host": host_name()})
    return [theirs["host"] for theirs in messages]


def _group(ranks: list[int], timeout: timedelta) -> ProcessGroup:
    """The process group of these ranks, created once: blocks that are sharded before their root share it."""
    found = distributed_c10d._find_pg_by_ranks_and_tag(_TAG, ranks)
    group = found or distributed_c10d._new_group_with_tag(
        ranks, timeout=timeout, pg_tag=_TAG, use_local_synchronization=True
    )
    assert isinstance(group, ProcessGroup), f"this rank is none of {ranks}"
    return group
