"""GPUs by their data sheets, and the links between them: times of reads, adds and collectives.

`Links` counts latency, bandwidth, shared ports and nodes; `slowdown` simulates readers that share ports.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..machine.topology import Topology


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
    pair_gbs: Sequence[Sequence[float]],
    port_gbs: Sequence[float],
    shard_bytes: float,
    *,
    starts_s: Sequence[float],
    rounds: int = 1,
    latency_s: float = 0.0,
    rotated: bool = True,
) -> list[list[float]]:
    """Seconds that each round of each reader takes: [readers][rounds].

    Reader r starts at `starts_s[r]` and pulls `shard_bytes` from one owner after the other (rank + 1, rank + 2, ...;
    0, 1, 2, ... unless `rotated`), `rounds` times without pause. Owner o sends at most `pair_gbs[o][r]` to reader r,
    and `port_gbs[o] / n` to each of n readers. Each pull begins with `latency_s`. GB/s are 10^9 bytes per second.
    """
    ranks = len(port_gbs)
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
        readers = [0] * ranks
        for owner in at.values():
            readers[owner] += 1
        rate = {r: 1e9 * min(pair_gbs[o][r], port_gbs[o] / readers[o]) for r, o in at.items()}
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


def slowdown(
    pair_gbs: Sequence[Sequence[float]], port_gbs: Sequence[float], *, rounds: int = 3, seed: int = 0
) -> float:
    """The slowdown of an average read when all ranks read all the time, relative to one reader; 1 or more.

    Readers start at random times within the first read, as ODC does not synchronise them.
    """
    ranks = len(port_gbs)
    if ranks < 3:
        return 1.0  # one reader per port
    quick = 1e9
    alone = [
        sum(quick / (1e9 * min(pair_gbs[o][r], port_gbs[o])) for o in range(ranks) if o != r) for r in range(ranks)
    ]
    generator = random.Random(seed)
    starts_s = [generator.random() * max(alone) for _ in range(ranks)]
    took = read_seconds(pair_gbs, port_gbs, quick, starts_s=starts_s, rounds=rounds)
    return max(1.0, sum(map(sum, took)) / (rounds * sum(alone)))


@dataclass(frozen=True, kw_only=True)
class Links:
    """`nodes` equal nodes of `len(port_gbs)` GPUs each. GB/s (10^9 bytes) per direction, as reached in practice.

    `pair_gbs[owner][reader]` is between two GPUs of a node, `port_gbs` a GPU's total in each direction (with a
    switch, the same as a pair's; in a mesh, the sum of the pairs'), `nic_gbs` per GPU to other nodes. A pull from one
    owner adds `latency_s`, as does a step of a collective; between nodes both add `nic_latency_s`.

    Collectives take `sm_share` of the SMs while bytes move; reads and adds go through the copy engine.

    Raises ValueError for sizes that don't match and for numbers that are not finite and positive.
    """

    pair_gbs: tuple[tuple[float, ...], ...]
    port_gbs: tuple[float, ...]
    nodes: int = 1
    nic_gbs: float = 25.0
    latency_s: float = 5e-6
    nic_latency_s: float = 15e-6
    sm_share: float = 0.0
    sharing: bool = field(default=True)

    def __post_init__(self) -> None:
        size = len(self.port_gbs)
        if size < 1 or len(self.pair_gbs) != size or any(len(row) != size for row in self.pair_gbs):
            raise ValueError(f"Links: {size} ports and {len(self.pair_gbs)} rows of pairs: give one of each per GPU")
        if self.nodes < 1:
            raise ValueError(f"Links: nodes is {self.nodes}: give 1 or more")
        pairs = [gbs for o, row in enumerate(self.pair_gbs) for r, gbs in enumerate(row) if o != r]
        for name, values in (("pair_gbs", pairs), ("port_gbs", self.port_gbs), ("nic_gbs", [self.nic_gbs])):
            for gbs in values:
                if math.isnan(gbs) or gbs <= 0:
                    raise ValueError(f"Links: {name} has {gbs} GB/s: bandwidths must be positive")
        for name in ("latency_s", "nic_latency_s", "sm_share"):
            if not 0 <= getattr(self, name) < (1 if name == "sm_share" else math.inf):
                raise ValueError(f"Links: {name} is {getattr(self, name)}: give 0 or more, and a share below 1")

    @classmethod
    def switched(cls, gpus: int, gbs: float, **others: object) -> Links:
        """`gpus` in a node, with ports that carry `gbs` each, to any other GPU."""
        return cls(pair_gbs=((gbs,) * gpus,) * gpus, port_gbs=(gbs,) * gpus, **others)  # type: ignore[arg-type]

    @classmethod
    def none(cls, gpus: int, nodes: int = 1) -> Links:
        """Communication that takes no time, as on the CPU backend, where ranks share memory."""
        free = {"latency_s": 0.0, "nic_latency_s": 0.0, "nic_gbs": math.inf, "nodes": nodes, "sharing": False}
        return cls.switched(gpus, math.inf, **free)

    @classmethod
    def from_topology(cls, topology: Topology, *, gpus: int, efficiency: float = 0.8, **others: object) -> Links:
        """One node's links as the driver reports them; `efficiency`: reached over nominal bandwidth.

        Raises ValueError if the number of GPUs is not `gpus`, and, naming them, for pairs that can't hold shards of one
        model or whose bandwidth is unknown.
        """
        devices = topology.devices
        if len(devices) != gpus:
            raise ValueError(
                f"the topology has {len(devices)} GPUs, but a node must have {gpus}: give --gpus {len(devices)} "
                "(times --nodes), or the snapshot of a node of that size"
            )
        gbs = [[0.0] * gpus for _ in devices]
        ports = [0.0] * gpus
        place = {device.uuid: index for index, device in enumerate(devices)}
        for pair in topology.pairs:
            names = f"{pair.one.label} and {pair.other.label}"
            if pair.is_unusable:
                raise ValueError(f"{names} can't read or add to each other ({pair.access.name}): leave one of them out")
            if pair.gbs is None:
                raise ValueError(f"the bandwidth between {names} is unknown: leave --topology out and give --gpu")
            o, r = place[pair.one.uuid], place[pair.other.uuid]
            gbs[o][r] = gbs[r][o] = pair.gbs * efficiency
            # Links to different peers add up; behind a switch, or one slot, all peers share the same links.
            shared = pair.through_switch or not pair.nvlinks
            for each in (o, r):
                ports[each] = max(ports[each], gbs[o][r]) if shared else ports[each] + gbs[o][r]
        if gpus == 1:
            ports = [math.inf]
        return cls(pair_gbs=tuple(map(tuple, gbs)), port_gbs=tuple(ports), **others)  # type: ignore[arg-type]

    @property
    def gpus(self) -> int:
        """Of each node."""
        return len(self.port_gbs)

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @cached_property
    def _slowdown(self) -> float:
        return slowdown(self.pair_gbs, self.port_gbs) if self.sharing and math.isfinite(self.port_gbs[0]) else 1.0

    def read_s(self, whole_bytes: float, *, hybrid: bool) -> list[float]:
        """Seconds for each rank to read, or add to, a tensor of `whole_bytes`, one owner after the other.

        All ranks do so concurrently, unsynchronised, so `slowdown` is included. `hybrid`: the owners are the node's
        GPUs; else all ranks, those on other nodes through the reader's own network port.
        """
        owners = self.gpus if hybrid else self.ranks
        shard = whole_bytes / owners
        seconds = []
        for reader in range(self.gpus):
            peers = [o for o in range(self.gpus) if o != reader]
            near = sum(shard / (1e9 * min(self.pair_gbs[o][reader], self.port_gbs[o])) for o in peers)
            far = 0 if hybrid else self.ranks - self.gpus
            seconds.append(
                near * self._slowdown
                + len(peers) * self.latency_s
                + far * (shard / (1e9 * self.nic_gbs) + self.nic_latency_s)
            )
        return seconds * self.nodes

    def collective_s(self, whole_bytes: float, *, hybrid: bool) -> float:
        """Seconds of an all-gather or reduce-scatter of `whole_bytes` over the node, or (not `hybrid`) all ranks.

        Rings over all links: bytes (n - 1) / n over the slowest GPU's links. Between nodes every byte enters a node
        once, through all its network ports together, and the number of steps grows with the logarithm of the nodes.
        """
        near = (self.gpus - 1) * self.latency_s
        if self.gpus > 1:
            near += whole_bytes * (self.gpus - 1) / self.gpus / (1e9 * min(self.port_gbs))
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
