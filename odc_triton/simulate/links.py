"""How long reads, adds and collectives take on what joins the GPUs: latency, bandwidth, shared ports, nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ..machine.topology import Topology
from .ports import slowdown

Engine = Literal["copy", "sms"]


@dataclass(frozen=True, kw_only=True)
class Links:
    """`nodes` alike, each of `len(port_gbs)` GPUs. GB/s (10^9 bytes) per direction, what is really reached.

    `pair_gbs[owner][reader]` joins two GPUs of a node, `port_gbs` is what a GPU sends or takes altogether (equal to a
    pair's behind a switch, the sum of the pairs' in a mesh), `nic_gbs` per GPU to other nodes. A pull from one owner
    takes `latency_s`, a step of a collective too; `nic_latency_s` stands for both between nodes.

    `engine`: what moves the bytes of reads and adds. "copy": the copy engine, which takes nothing from the compute;
    "sms": a kernel, which takes `sm_share` of the SMs while bytes move. Collectives always take `sm_share`.

    Raises ValueError for sizes that don't fit each other and for numbers that are not finite and positive.
    """

    pair_gbs: tuple[tuple[float, ...], ...]
    port_gbs: tuple[float, ...]
    nodes: int = 1
    nic_gbs: float = 25.0
    latency_s: float = 5e-6
    nic_latency_s: float = 15e-6
    engine: Engine = "copy"
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
                    raise ValueError(f"Links: {name} has {gbs} GB/s: bandwidths are positive")
        for name in ("latency_s", "nic_latency_s", "sm_share"):
            if not 0 <= getattr(self, name) < (1 if name == "sm_share" else math.inf):
                raise ValueError(f"Links: {name} is {getattr(self, name)}: give 0 or more, and a share below 1")
        if self.engine not in ("copy", "sms"):
            raise ValueError(f"Links: engine is {self.engine!r}: give 'copy' or 'sms'")

    @classmethod
    def switched(cls, gpus: int, gbs: float, **others: object) -> Links:
        """`gpus` in a node whose ports carry `gbs` each, to whichever other."""
        return cls(pair_gbs=((gbs,) * gpus,) * gpus, port_gbs=(gbs,) * gpus, **others)  # type: ignore[arg-type]

    @classmethod
    def none(cls, gpus: int, nodes: int = 1) -> Links:
        """Communication that takes no time, as on the CPU backend, where reading is looking at shared memory."""
        free = {"latency_s": 0.0, "nic_latency_s": 0.0, "nic_gbs": math.inf, "nodes": nodes, "sharing": False}
        return cls.switched(gpus, math.inf, **free)

    @classmethod
    def from_topology(cls, topology: Topology, *, gpus: int, efficiency: float = 0.8, **others: object) -> Links:
        """Of one node's GPUs as the driver shows them; `efficiency`: reached over nominal bandwidth.

        Raises ValueError where their number is not `gpus`, and naming pairs that can't hold shards of one model or
        whose bandwidth is unknown.
        """
        devices = topology.devices
        if len(devices) != gpus:
            raise ValueError(
                f"the topology has {len(devices)} GPUs, but a node is to have {gpus}: give --gpus {len(devices)} "
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
            # Links of their own add up; behind a switch, or in one slot, they are the same ones for every peer.
            shared = pair.through_switch or not pair.nvlinks
            for each in (o, r):
                ports[each] = max(ports[each], gbs[o][r]) if shared else ports[each] + gbs[o][r]
        if gpus == 1:
            ports = [math.inf]
        return cls(pair_gbs=tuple(map(tuple, gbs)), port_gbs=tuple(ports), **others)  # type: ignore[arg-type]

    @property
    def gpus(self) -> int:
        """Of one node."""
        return len(self.port_gbs)

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @cached_property
    def _slowdown(self) -> float:
        return slowdown(self.pair_gbs, self.port_gbs) if self.sharing and math.isfinite(self.port_gbs[0]) else 1.0

    def read_s(self, whole_bytes: float, *, hybrid: bool) -> list[float]:
        """Seconds for each rank to read, or add to, a tensor of `whole_bytes`, from or to one owner after the other.

        All ranks do so at once and not in step: `ports.slowdown` is counted. `hybrid`: owners are the node's GPUs;
        else all ranks, those of other nodes through the reader's own network port.
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
        once, through all its network ports together, and steps grow with the logarithm of the nodes.
        """
        near = (self.gpus - 1) * self.latency_s
        if self.gpus > 1:
            near += whole_bytes * (self.gpus - 1) / self.gpus / (1e9 * min(self.port_gbs))
        if hybrid or self.nodes == 1:
            return near
        far = whole_bytes * (self.nodes - 1) / self.nodes / (1e9 * self.nic_gbs * self.gpus)
        return max(near, far) + math.log2(self.nodes) * self.nic_latency_s

    def replicas_s(self, shard_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of `shard_bytes` per GPU over the nodes' GPUs of one place."""
        if self.nodes == 1:
            return 0.0
        moved = shard_bytes * (self.nodes - 1) / self.nodes / (1e9 * self.nic_gbs)
        return moved + math.log2(self.nodes) * self.nic_latency_s
