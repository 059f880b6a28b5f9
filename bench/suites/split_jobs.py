"""Jobs of a small model on segments of samples, for host_faults.py: plans, samples, one minibatch, its ranks."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc_triton import enable_split, fully_shard, minibatch
from odc_triton.balance import PackedDataset, count_target_tokens, pack_collate
from odc_triton.engine.api import engine_of
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.jobs.launcher.launch import die_with_parent, end_process
from odc_triton.plan.entries import Entry, Segment
from odc_triton.plan.plan import Plan

from ..stdlib_corpus import qwen2
from .hosts_net import INTERFACE, Hosts
from .kill_checks import own_processes

LAYERS = 3
VOCABULARY = 97
_PORT = 29500  # on a host of the job's own
TOKENS = 400  # of each rank, more than any plan here lets others read
RIDER_TOKENS = 29  # of an unsplit sample next to segments, in a job with a fault

Dealt = list[list[list[Entry]]]


class Deal:
    """What ranks compute in one minibatch. `packs`: by rank; `lengths`: tokens by sample."""

    def __init__(self, ranks: int) -> None:
        self.packs: Dealt = [[] for _ in range(ranks)]
        self.lengths: list[int] = []

    def whole(self, length: int) -> int:
        self.lengths.append(length)
        return len(self.lengths) - 1

    def segments(self, lengths: list[int]) -> list[Segment]:
        """A new sample in segments."""
        sample, ends = self.whole(sum(lengths)), [0, *accumulate(lengths)]
        return [Segment(sample, start, stop) for start, stop in pairwise(ends)]


def deal_evenly(numbers: random.Random, ranks: int, replicas: int) -> Deal:
    """Two waves of each replica, in which each rank has two segments and an unsplit sample; some have unsplit samples
    after them.

    A wave is one sample that goes up and down the ranks, so that each waits for all others and they for it; or a ring
    of samples over two ranks each, so that each waits for one and another waits for it.
    """
    deal, shards = Deal(ranks), ranks // replicas
    for first in range(0, ranks, shards):
        _deal_evenly(deal, deal.packs[first : first + shards], numbers)
    return deal


def _deal_evenly(deal: Deal, packs_of: Dealt, numbers: random.Random) -> None:
    ranks = len(packs_of)
    for _ in range(2):
        lengths = [numbers.randint(4, 20) for _ in range(2 * ranks)]
        if numbers.random() < 0.5:
            segments = deal.segments(lengths)
            pairs = [[segments[rank], segments[-1 - rank]] for rank in range(ranks)]
        else:
            rows = [deal.segments(lengths[2 * rank : 2 * rank + 2]) for rank in range(ranks)]
            pairs = [[rows[rank][0], rows[rank - 1][1]] for rank in range(ranks)]
        for packs, pair in zip(packs_of, pairs, strict=True):
            packs.append([*pair, deal.whole(RIDER_TOKENS)])
    for packs in packs_of:
        if numbers.random() < 0.5:
            packs.append([deal.whole(numbers.randint(2, 30))])


def samples(deal: Deal, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in deal.lengths]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]


def build() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = qwen2(VOCABULARY, 32, 48, LAYERS, 4, 2, 512, False)
    model = Qwen2ForCausalLM(Qwen2Config(**config)).train()
    enable_packing(model)
    return model


def sharded(timeout_s: float, replicas: int) -> nn.Module:
    mesh = dist.init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )
    model = fully_shard(build(), mesh=mesh, backend="cpu", timeout=timedelta(seconds=timeout_s))
    enable_split(model, tokens=TOKENS)
    return model


def compute(model: nn.Module, deal: Deal, rank: int, seed: int) -> None:
    """One minibatch."""
    plan = Plan.by_hand(deal.packs, replicas=engine_of(model).grid.replicas)
    packs = pack_collate(PackedDataset(samples(deal, seed)).__getitems__(plan.packs(rank)))
    with minibatch(model, plan=packs) as mb:
        for pack in packs:
            (summed_loss(model, pack) / mb.tokens).backward()


def compute_whole(model: nn.Module, deal: Deal, seed: int) -> None:
    """The same samples by a model that is not sharded."""
    model.zero_grad()
    packs = pack_collate([[each] for each in samples(deal, seed)])
    tokens = count_target_tokens(packs)
    for pack in packs:
        (summed_loss(model, pack) / tokens).backward()


def _rank(
    connection: Connection,
    function: Callable[..., None],
    rank: int,
    ranks: int,
    environment: dict[str, str],
    hosts: Hosts,
    folder: str,
    args: tuple,
) -> None:
    die_with_parent()
    os.setsid()  # what it leaves running could be found
    os.environ.update(environment | {"TMPDIR": folder, "TRITON_INTERPRET": "1"})
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})
    hosts.enter(rank * len(hosts.addresses) // ranks)
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        function(rank, ranks, lambda *message: connection.send((rank, message)), *args)
    except Exception as error:
        connection.send((rank, ("error", f"{type(error).__name__}: {error}", getattr(error, "ranks", None))))
    connection.close()
    end_process(0)


class Job:
    """`function(rank, ranks, say, *args)` on `ranks` processes, forked from a server that has imported transformers;
    what a rank gives to `say` comes out of `messages`. To be used in a `with` block, after which `leftovers` looks for
    what has stayed.

    `hosts`: equally many ranks on each. Their store is on the first one, `in_rank_0` or in a process of its own as by
    torchrun.
    """

    def __init__(self, function: Callable[..., None], ranks: int, *args: Any, hosts: Hosts, in_rank_0: bool) -> None:
        self._function, self._ranks, self._args = function, ranks, args
        self._hosts, self._in_rank_0 = hosts, in_rank_0

    def __enter__(self) -> Job:
        self._shared = set(os.listdir("/dev/shm"))
        self._folder = tempfile.TemporaryDirectory()
        environment = {"MASTER_ADDR": self._hosts.addresses[0], "MASTER_PORT": str(_PORT)}
        environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCHELASTIC_USE_AGENT_STORE": str(not self._in_rank_0)}
        self._store = None
        if not self._in_rank_0:
            server = functools.partial(dist.TCPStore, self._hosts.addresses[0], _PORT, None, True)
            self._store = self._hosts.call(0, functools.partial(server, wait_for_workers=False))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2", __name__])
        self.processes, self._connections = [], []
        for rank in range(self._ranks):
            receiver, sender = context.Pipe(duplex=False)
            given = (sender, self._function, rank, self._ranks, environment, self._hosts, self._folder.name, self._args)
            self.processes.append(context.Process(target=_rank, args=given))
            self.processes[-1].start()
            sender.close()
            self._connections.append(receiver)
        return self

    def messages(self, timeout_s: float) -> Iterator[tuple[int, tuple]]:
        """(rank, what it said), until all ranks have ended, or none has said a word for `timeout_s`."""
        while self._connections and (ready := wait(self._connections, timeout_s)):
            for connection in ready:
                try:
                    yield connection.recv()
                except EOFError:
                    self._connections.remove(connection)
        for process in self.processes if not self._connections else ():
            process.join(timeout_s)

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._store = None
        self._kept = os.listdir(self._folder.name)
        self._folder.cleanup()

    def leftovers(self) -> list[str]:
        """Processes of the job, and with them what memory they map; temporary files; names in /dev/shm."""
        pids = [process.pid for process in self.processes]
        found = [f"process {each.pid}" for pid in pids for each in own_processes(pid, Path(self._folder.name))]
        found += [f"file {name}" for name in self._kept]
        new = set(os.listdir("/dev/shm")) - self._shared
        return found + [f"/dev/shm/{name}" for name in new if any(str(pid) in name for pid in pids)]
