"""Starts the process group of a job that has none yet, and assigns each rank its GPU."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..base.errors import DeadlineExceeded, RanksDiffer, describe
from .barrier import Barrier
from .memory.rendezvous import STORE

_PURPOSE = "starting the process group: each rank's device"


def gpu_index(
    environment: Mapping[str, str],
    visible: int,
    *,
    current: int | None = None,
    bound: int | None = None,
    has_group: bool = False,
) -> int:
    """The index of this process's own GPU among the `visible` ones.

    `bound`: the GPU that its process group was made for. `current`: the one that torch uses already, None before CUDA
    is initialised; it counts as chosen if it is not the first one, or if there is a process group, as training scripts
    choose before they make one. Otherwise LOCAL_RANK (or RANK) modulo `visible`: the only GPU if a launcher shows each
    process its own (CUDA_VISIBLE_DEVICES, Ray), and a shared one if there are more ranks than GPUs.

    Raises RuntimeError without a GPU.
    """
    if visible < 1:
        names = environment.get("CUDA_VISIBLE_DEVICES")
        raise RuntimeError(
            f"this rank sees no GPU (CUDA_VISIBLE_DEVICES is {names!r}): show it one, or give backend='cpu'"
        )
    if bound is not None:
        return bound
    if current is not None and (current or has_group):
        return current
    return int(environment.get("LOCAL_RANK", environment.get("RANK", 0))) % visible


def group_kinds(devices: Sequence[str | None]) -> str:
    """The process group's backends. `devices`: every rank's, None on a CPU, else a GPU's UUID.

    NCCL refuses two ranks on one GPU; gloo does not. Raises RanksDiffer if some ranks have a GPU and some have none.
    """
    without = [rank for rank, device in enumerate(devices) if device is None]
    if len(without) == len(devices):
        return "gloo"
    if without:
        raise RanksDiffer(
            f"ranks {without} compute on the CPU and the others on GPUs: show each rank a GPU, or none to any"
        )
    return "cpu:gloo,cuda:nccl" if len(set(devices)) == len(devices) else "gloo"


def take_gpu() -> None:
    """Makes this rank's GPU, by `gpu_index`, the current device."""
    has_group = dist.is_initialized()
    bound = dist.distributed_c10d._get_default_group().bound_device_id if has_group else None
    index = gpu_index(
        os.environ,
        torch.cuda.device_count(),
        current=torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        bound=None if bound is None else bound.index,
        has_group=has_group,
    )
    torch.cuda.set_device(index)


def rendezvous_url() -> str:
    """This rank's `init_method`: our launcher's store, or the one in torchrun's variables."""
    if STORE not in os.environ:
        return "env://"
    from . import local_store  # noqa: F401  torch knows it from here on

    return "odc://"


def start_process_group(timeout: timedelta, gpu_id: Callable[[], str | None] | None = None) -> None:
    """Where there is none: our launcher's process group, torchrun's, or that of any launcher that sets RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT; else a world of one. Collective. `gpu_id`: names the rank's GPU, uniquely
    in the job, once it is chosen here; None on CPUs.

    Raises RanksDiffer if the ranks' devices are of different kinds, DeadlineExceeded if a rank does not arrive.
    """
    if "RANK" not in os.environ:  # a notebook: a world of one takes the same path as any other
        if gpu_id is not None:
            take_gpu()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    store, rank, world = next(rendezvous(rendezvous_url(), timeout=timeout))
    store.set_timeout(timeout)
    number = store.add(f"odc/process_group/{rank}", 1)
    barrier = Barrier(
        store=dist.PrefixStore(f"odc/process_group/{number}", store),
        rank=rank,
        world=world,
        timeout_s=timeout.total_seconds(),
    )
    try:
        mine = None
        if gpu_id is not None:
            take_gpu()
            mine = gpu_id()
    except Exception as error:  # the other ranks must not wait for this one
        barrier.post(_PURPOSE, {"refused": f"rank {rank} has no device: {describe(error)}"})
        raise
    kinds = group_kinds([theirs["device"] for theirs in barrier.exchange(_PURPOSE, {"device": mine})])
    store = dist.PrefixStore(f"default_pg/{number}", store)  # an earlier group has left its addresses in the store
    begun_s = time.monotonic()
    try:
        dist.init_process_group(kinds, store=store, rank=rank, world_size=world, timeout=timeout)
    except RuntimeError as error:
        if (waited_s := time.monotonic() - begun_s) < 0.9 * timeout.total_seconds():
            raise
        late = re.search(r"keys: \S*/(\d+)$", str(error))  # gloo's, of a rank's address
        others = [int(late[1])] if late else [each for each in range(world) if each != rank]
        words = f"rank {rank} waited {waited_s:.1f} s for ranks {others} to connect: the deadline has passed"
        raise DeadlineExceeded(others, words) from error
