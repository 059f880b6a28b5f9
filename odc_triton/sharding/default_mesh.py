"""The mesh of ranks that nobody gave one: one dimension on one host, a replica per host on several."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import RanksDiffer
from ..comm.meeting import Meetings
from ..comm.process_group import start_process_group
from .backend import backend_of

_DIMENSIONS = ("replicate", "shard")
_TAG = "odc"


def default_mesh(timeout: timedelta, backend: str = "auto", *, replicas: int | None = None) -> DeviceMesh:
    """All ranks, in `replicas` groups that hold the model once each; by default a group per host. Collective.

    One-dimensional for one replica, else ("replicate", "shard"). Without a process group it starts torchrun's, or else
    a world of one; `timeout` is its own then.

    The group is taken as it is: `init_device_mesh` would set another one beside a gloo group where there are GPUs.

    Raises ValueError for ranks that can't be split into so many, RanksDiffer where they lie unevenly on their hosts.
    """
    chosen = backend_of(backend, None)
    start_process_group(chosen, timeout)
    if replicas is None:
        replicas = _count_hosts(timeout)
    if replicas == 1:
        return DeviceMesh.from_group(dist.group.WORLD, chosen.mesh_device)
    world = dist.get_world_size()
    if replicas < 1 or world % replicas:
        raise ValueError(f"{world} ranks can't be {replicas} replicas of equal size: give a divisor of {world}")
    ranks = torch.arange(world).view(replicas, -1)
    replica, shard = divmod(dist.get_rank(), ranks.shape[1])
    # All ranks make theirs in this order, so none waits for another in a circle.
    groups = [_group(ranks[:, shard].tolist(), timeout), _group(ranks[replica].tolist(), timeout)]
    return DeviceMesh.from_group(groups, chosen.mesh_device, mesh=ranks, mesh_dim_names=_DIMENSIONS)


def host_name() -> str:
    """Names the host and network namespace: ranks that share memory find each other by an abstract socket of it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} ({boot}, {os.readlink('/proc/self/ns/net')})"


def even_hosts(hosts: Sequence[str]) -> int:
    """How many hosts the ranks lie on. Raises RanksDiffer unless each has equally many, of numbers in a row."""
    runs = [(name, len(list(ranks))) for name, ranks in groupby(hosts)]
    counts = [count for _, count in runs]
    if len(set(counts)) > 1 or len({name for name, _ in runs}) < len(runs):
        raise RanksDiffer(
            f"the ranks lie on several hosts, in turn {counts}: replicas take equally many ranks on each host, "
            f"numbered host by host, as torchrun --nnodes numbers them"
        )
    return len(runs)


def _count_hosts(timeout: timedelta) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return 1
    store = distributed_c10d._get_default_store()
    meetings = Meetings.in_corner(store, "odc/hosts", rank=rank, world=world, timeout=timeout)
    messages = meetings.meet("finding each rank's host", {"host": host_name()})
    return even_hosts([theirs["host"] for theirs in messages])


def _group(ranks: list[int], timeout: timedelta) -> ProcessGroup:
    """The process group of these ranks, made once: blocks that are sharded before their root share it."""
    found = distributed_c10d._find_pg_by_ranks_and_tag(_TAG, ranks)
    return found or distributed_c10d._new_group_with_tag(
        ranks, timeout=timeout, pg_tag=_TAG, use_local_synchronization=True
    )
