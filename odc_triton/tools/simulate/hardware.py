"""GPUs by their data sheets, and the links between them: times of reads, adds and collectives.

`Links` counts latency, bandwidth, shared ports and nodes; `slowdown` simulates readers that share ports.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """Dense bf16 (V100: fp16) TFLOP/s, GB of memory, GB/s of memory, GB/s between GPUs per direction.

    `nic_gbs`: GB/s per GPU between nodes, in a typical cluster of its time (one 200 or 400 Gb/s port per GPU).
    """

    tflops: float
    memory_gb: float
    memory_gbs: float
    link_gbs: float
    nic_gbs: float


DEVICES = {
    "v100": GpuKind(tflops=125, memory_gb=32, memory_gbs=900, link_gbs=150, nic_gbs=12.5),
    "a100": GpuKind(tflops=312, memory_gb=80, memory_gbs=2039, link_gbs=300, nic_gbs=25),
    "a6000": GpuKind(tflops=155, memory_gb=48, memory_gbs=768, link_gbs=31.5, nic_gbs=12.5),
    "l40s": GpuKind(tflops=362, memory_gb=48, memory_gbs=864, link_gbs=31.5, nic_gbs=25),
    "h100": GpuKind(tflops=989, memory_gb=80, memory_gbs=3350, link_gbs=450, nic_gbs=50),
    "h200": GpuKind(tflops=989, memory_gb=141, memory_gbs=4800, link_gbs=450, nic_gbs=50),
    "b200": GpuKind(tflops=2250, memory_gb=180, memory_gbs=7700, link_gbs=900, nic_gbs=50),
}


def find_device(name: str) -> GpuKind:
    """Finds it by a word in the name, such as `h100` in `NVIDIA H100 80GB HBM3`. Raises ValueError for other names."""
    words = re.split(r"\W+", name.lower())  # a GH200 is no H200
    found = [kind for word, kind in DEVICES.items() if word in words]
    if len(found) != 1:
        raise ValueError(f"the GPU {name!r} is not known: give --gpu, one of {', '.join(DEVICES)}")
    return found[0]


def read_seconds(starts: Sequence[float], *, rounds: int = 1) -> list[list[float]]:
    """What each round of each reader takes: [readers][rounds]. The unit is the time of a shard from an idle owner.

    Reader r starts at `starts[r]` and pulls shards from one owner after the other (rank + 1, rank + 2, ...), `rounds`
    times without pause. An owner sends to each of n readers at 1 / n of its speed.
    """
    ranks, nobody = len(starts), len(starts)
    shards = rounds * (ranks - 1)  # that each pulls
    pulled, began = [0] * ranks, [*starts]
    took: list[list[float]] = [[] for _ in range(ranks)]
    # Of those that read; of others the owner is `nobody`, and what is left is infinite.
    owner, left = np.full(ranks, nobody), np.full(ranks, np.inf)  # `left`: of the current shard
    readers = np.array([0.0] * ranks + [1.0])  # by owner
    coming = sorted(range(ranks), key=starts.__getitem__, reverse=True)
    now, reading = 0.0, ranks if shards else 0

    def pull(reader: int) -> None:
        owner[reader] = (reader + 1 + pulled[reader] % (ranks - 1)) % ranks
        readers[owner[reader]] += 1
        left[reader] = 1.0

    while reading:
        while coming and starts[coming[-1]] <= now:
            pull(coming.pop())
        shared_by = readers[owner]
        ends = [now + (left * shared_by).min(), *(starts[reader] for reader in coming[-1:])]
        soonest = float(min(ends))
        left -= (soonest - now) / shared_by
        for reader in np.flatnonzero(left <= 1e-9).tolist():
            readers[owner[reader]] -= 1
            pulled[reader] += 1
            if pulled[reader] % (ranks - 1) == 0:
                took[reader].append(soonest - began[reader])
                began[reader] = soonest
            if pulled[reader] < shards:
                pull(reader)
            else:
                owner[reader], left[reader] = nobody, np.inf
                reading -= 1
        now = soonest
    return took


@cache
def slowdown(ranks: int, *, rounds: int = 3, seed: int = 0) -> float:
    """The slowdown of an average read when all ranks read all the time, relative to one reader; 1 or more.

    Readers start at random times within the first read, as ODC does not synchronise them.
    """
    if ranks < 3:
        return 1.0  # one reader per port
    generator = random.Random(seed)
    took = read_seconds([generator.random() * (ranks - 1) for _ in range(ranks)], rounds=rounds)
    return max(1.0, sum(map(sum, took)) / (rounds * ranks * (ranks - 1)))


@dataclass(frozen=True, kw_only=True)
class Links:
    """Equal nodes of GPUs, and their speeds in GB/s (10^9 bytes) per direction, as reached in practice.

    gpus: of each node.
    gbs: what a GPU's port carries, to any of its node through a switch.
    nodes: their number.
    nic_gbs: per GPU to other nodes.
    latency_s: is added by a pull from one owner, and by a step of a collective.
    nic_latency_s: is added to both between nodes.
    sm_share: of the SMs, what collectives take while bytes move; reads and adds go through the copy engine.

    Raises ValueError for speeds that are not positive.
    """

    gpus: int
    gbs: float
    nodes: int = 1
    nic_gbs: float = 25.0
    latency_s: float = 5e-6
    nic_latency_s: float = 15e-6
    sm_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"Links: {name} is {getattr(self, name)}: give 1 or more")
        for name in ("gbs", "nic_gbs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Links: {name} is {getattr(self, name)} GB/s: bandwidths are positive")

    @classmethod
    def none(cls, gpus: int, nodes: int = 1) -> Links:
        """Communication that takes no time, as on the CPU backend, where ranks share memory.

        gpus, nodes: as of `Links`.
        """
        return cls(gpus=gpus, gbs=math.inf, nodes=nodes, nic_gbs=math.inf, latency_s=0.0, nic_latency_s=0.0)

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    def read_s(self, whole_bytes: float) -> float:
        """Seconds for a rank to read, or add to, a tensor of `whole_bytes`, in shards on the node's GPUs, one after the
        other. All ranks do so concurrently, unsynchronised, so `slowdown` is included.
        """
        return (self.gpus - 1) * (whole_bytes / self.gpus / (1e9 * self.gbs) * slowdown(self.gpus) + self.latency_s)

    def collective_s(self, whole_bytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of `whole_bytes` over the node, as a ring."""
        return (self.gpus - 1) * (whole_bytes / self.gpus / (1e9 * self.gbs) + self.latency_s)

    def replicas_s(self, shard_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of `shard_bytes` per GPU over one GPU of each node."""
        if self.nodes == 1:
            return 0.0
        moved = shard_bytes * (self.nodes - 1) / self.nodes / (1e9 * self.nic_gbs)
        return moved + math.log2(self.nodes) * self.nic_latency_s
