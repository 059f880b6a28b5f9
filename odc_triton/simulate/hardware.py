"""GPUs by their data sheets, and the links between them: times of reads, adds and collectives.

`Links` counts latency, bandwidth, shared ports and nodes; `slowdown` simulates readers that share ports.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


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
    found = [kind for word, kind in DEVICES.items() if word in name.lower()]
    if len(found) != 1:
        raise ValueError(f"the GPU {name!r} is not known: give --gpu, one of {', '.join(DEVICES)}")
    return found[0]


def read_seconds(
    ranks: int,
    gbs: float,
    shard_bytes: float,
    *,
    starts_s: Sequence[float],
    rounds: int = 1,
    latency_s: float = 0.0,
    rotated: bool = True,
) -> list[list[float]]:
    """Seconds that each round of each reader takes: [readers][rounds].

    Reader r starts at `starts_s[r]` and pulls `shard_bytes` from one owner after the other (rank + 1, rank + 2, ...;
    0, 1, 2, ... unless `rotated`), `rounds` times without pause. An owner sends `gbs / n` to each of n readers. Each
    pull begins with `latency_s`. GB/s are 10^9 bytes per second.
    """
    order = [[(r + k) % ranks for k in range(1, ranks)] for r in range(ranks)]
    if not rotated:
        order = [sorted(owners) for owners in order]
    place = [0] * ranks  # pulls begun
    total = rounds * (ranks - 1)
    left = [float(shard_bytes)] * ranks
    opens_s = [start + latency_s for start in starts_s]  # when the pull's bytes start to flow
    began_s = list(starts_s)
    took: list[list[float]] = [[] for _ in range(ranks)]
    now_s = 0.0
    while any(p < total for p in place):
        flowing = [r for r in range(ranks) if place[r] < total and opens_s[r] <= now_s]
        at = {r: order[r][place[r] % (ranks - 1)] for r in flowing}
        readers = Counter(at.values())
        rate = {r: 1e9 * gbs / readers[o] for r, o in at.items()}
        next_s = min(
            [opens_s[r] for r in range(ranks) if place[r] < total and opens_s[r] > now_s]
            + [now_s + left[r] / rate[r] for r in flowing]
        )
        for r in flowing:
            left[r] -= rate[r] * (next_s - now_s)
            if left[r] <= 1e-9 * shard_bytes:
                place[r] += 1
                left[r] = float(shard_bytes)
                opens_s[r] = next_s + latency_s
                if place[r] % (ranks - 1) == 0:
                    took[r].append(next_s - began_s[r])
                    began_s[r] = next_s
        now_s = next_s
    return took


def slowdown(ranks: int, *, rounds: int = 3, seed: int = 0) -> float:
    """The slowdown of an average read when all ranks read all the time, relative to one reader; 1 or more.

    Readers start at random times within the first read, as ODC does not synchronise them.
    """
    if ranks < 3:
        return 1.0  # one reader per port
    alone_s = ranks - 1.0  # at one second per shard
    generator = random.Random(seed)
    starts_s = [generator.random() * alone_s for _ in range(ranks)]
    took = read_seconds(ranks, 1.0, 1e9, starts_s=starts_s, rounds=rounds)
    return max(1.0, sum(map(sum, took)) / (rounds * ranks * alone_s))


@dataclass(frozen=True, kw_only=True)
class Links:
    """`nodes` equal nodes of `gpus` GPUs each. GB/s (10^9 bytes) per direction, as reached in practice.

    `gbs` is what a GPU's port carries, to any of its node through a switch, `nic_gbs` per GPU to other nodes. A pull
    from one owner adds `latency_s`, as does a step of a collective; between nodes both add `nic_latency_s`.

    Collectives take `sm_share` of the SMs while bytes move; reads and adds go through the copy engine.

    Raises ValueError for numbers that are not finite and positive.
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
                raise ValueError(f"Links: {name} has {getattr(self, name)} GB/s: bandwidths must be positive")
        for name in ("latency_s", "nic_latency_s", "sm_share"):
            if not 0 <= getattr(self, name) < (1 if name == "sm_share" else math.inf):
                raise ValueError(f"Links: {name} is {getattr(self, name)}: give 0 or more, and a share below 1")

    @classmethod
    def none(cls, gpus: int, nodes: int = 1) -> Links:
        """Communication that takes no time, as on the CPU backend, where ranks share memory."""
        return cls(gpus=gpus, gbs=math.inf, nodes=nodes, nic_gbs=math.inf, latency_s=0.0, nic_latency_s=0.0)

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @cached_property
    def _slowdown(self) -> float:
        return slowdown(self.gpus) if math.isfinite(self.gbs) else 1.0

    def read_s(self, whole_bytes: float, *, hybrid: bool) -> float:
        """Seconds for a rank to read, or add to, a tensor of `whole_bytes`, one owner after the other.

        All ranks do so concurrently, unsynchronised, so `slowdown` is included. `hybrid`: the owners are the node's
        GPUs; else all ranks, those on other nodes through the reader's own network port.
        """
        shard = whole_bytes / (self.gpus if hybrid else self.ranks)
        near, far = self.gpus - 1, 0 if hybrid else self.ranks - self.gpus
        return near * (shard / (1e9 * self.gbs) * self._slowdown + self.latency_s) + far * (
            shard / (1e9 * self.nic_gbs) + self.nic_latency_s
        )

    def collective_s(self, whole_bytes: float, *, hybrid: bool) -> float:
        """Seconds of an all-gather or reduce-scatter of `whole_bytes` over the node, or (not `hybrid`) all ranks.

        Rings: bytes (n - 1) / n through each port. Between nodes every byte enters a node
        once, through all its network ports together, and the number of steps grows with the logarithm of the nodes.
        """
        near = (self.gpus - 1) * self.latency_s
        if self.gpus > 1:
            near += whole_bytes * (self.gpus - 1) / self.gpus / (1e9 * self.gbs)
        if hybrid or self.nodes == 1:
            return near
        far = whole_bytes * (self.nodes - 1) / self.nodes / (1e9 * self.nic_gbs * self.gpus)
        return max(near, far) + math.log2(self.nodes) * self.nic_latency_s

    def replicas_s(self, shard_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of `shard_bytes` per GPU over one GPU of each node."""
        if self.nodes == 1:
            return 0.0
        moved = shard_bytes * (self.nodes - 1) / self.nodes / (1e9 * self.nic_gbs)
        return moved + math.log2(self.nodes) * self.nic_latency_s
