"""The GPUs of a machine, their links, and which pairs can add to each other's memory. Pure.

`read_topology` in probe.py fills it in, unusable.py has remedies for pairs that can't. `P2P` has the
numbers of nvml.h (nvmlGpuP2PStatus_t).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum


class P2P(IntEnum):
    """One kind of access of a GPU to another's memory: OK, or the reason why not."""

    OK = 0
    CHIPSET_NOT_SUPPORTED = 1
    GPU_NOT_SUPPORTED = 2
    TOPOLOGY_NOT_SUPPORTED = 3
    DISABLED_BY_REGKEY = 4
    NOT_SUPPORTED = 5
    UNKNOWN = 6

    @classmethod
    def _missing_(cls, value: object) -> P2P:
        return cls.UNKNOWN

    @property
    def is_refused(self) -> bool:
        """False if unknown: opening the heap will show."""
        return self not in (P2P.OK, P2P.UNKNOWN)


_NOMINAL_GBS = (14, 20, 25, 50, 100)  # without the line code: as in data sheets, the same for all drivers
_PCIE_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `index` is nvidia-smi's, `cuda_index` this process's, None if masked. `pcie`: generation and lanes, at
    most in this machine, as an idle GPU lowers its generation.
    """

    index: int
    uuid: str
    cuda_index: int | None = None
    name: str = "GPU"
    bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    pcie: tuple[int | None, int | None] = (None, None)

    @property
    def label(self) -> str:
        return f"GPU{self.index}"

    @property
    def pcie_gbs(self) -> float | None:
        """GB/s per direction that its slot can carry."""
        generation, lanes = self.pcie
        return _PCIE_LANE_GBS[generation] * lanes if generation in _PCIE_LANE_GBS and lanes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two GPUs. `nvlinks` join them, through NVSwitch or directly, each of `link_gbs` GB/s per direction."""

    one: Gpu
    other: Gpu
    read: P2P = P2P.UNKNOWN
    write: P2P = P2P.UNKNOWN
    atomics: P2P = P2P.UNKNOWN
    nvlinks: int = 0
    through_switch: bool = False
    link_gbs: float | None = None

    @property
    def access(self) -> P2P:
        """Access to read and to write: the first of the two that fails."""
        return self.read if self.read.is_refused else self.write

    @property
    def pcie_gbs(self) -> float | None:
        """GB/s per direction of the slower slot of the two."""
        one, other = self.one.pcie_gbs, self.other.pcie_gbs
        return None if one is None or other is None else min(one, other)

    @property
    def gbs(self) -> float | None:
        """GB/s per direction, over all links between them; None if unknown or unreachable."""
        if self.access.is_refused:
            return None
        if self.nvlinks:
            return None if self.link_gbs is None else self.nvlinks * self.link_gbs
        return self.pcie_gbs

    @property
    def is_unusable(self) -> bool:
        """True if, according to the driver, they can't hold shards of one model."""
        return self.access.is_refused or self.atomics.is_refused

    @property
    def is_partly_unknown(self) -> bool:
        return P2P.UNKNOWN in (self.read, self.write, self.atomics)

    @property
    def kind(self) -> str:
        """An identifier for tables: `nvswitch-18x25`, `nvlink-4x25`, `pcie-gen4x16`, `unknown`."""
        if self.nvlinks:
            return f"{'nvswitch' if self.through_switch else 'nvlink'}-{self.nvlinks}x{_nominal(self.link_gbs)}"
        known = [(device.pcie_gbs, device.pcie) for device in (self.one, self.other) if device.pcie_gbs]
        if not known:
            return "unknown"
        _, (generation, lanes) = min(known, key=lambda slot: slot[0])
        return f"pcie-gen{generation}x{lanes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All GPUs that the driver shows, masked or not, and all pairs of them.

    `missing`: why the driver could not be queried; the rest then comes from CUDA. `lost`: GPUs that don't answer.
    """

    devices: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    missing: str | None = None
    lost: tuple[str, ...] = ()

    def only(self, uuids: Iterable[str | None]) -> Topology:
        """The part with these GPUs. UUIDs may lack their `GPU-`, as torch's do; unknown ones are left out."""
        wanted = {bare(uuid) for uuid in uuids if uuid is not None}
        kept = tuple(device for device in self.devices if bare(device.uuid) in wanted)
        pairs = tuple(pair for pair in self.pairs if pair.one in kept and pair.other in kept)
        return replace(self, devices=kept, pairs=pairs)

    def visible(self) -> Topology:
        """The part that is visible to this process."""
        return self.only(device.uuid for device in self.devices if device.cuda_index is not None)

    @property
    def key(self) -> str:
        """Names the links between these GPUs, for tables: `cpu`, `one-gpu`, or the slowest pair's kind.

        If some pairs have faster links it is `slowest+fastest`: `pcie-gen4x16+nvlink-4x14`. It does not depend on
        the GPUs' order or number, nor on the driver. For a job, use that of `only(uuids of all ranks)`.
        """
        if len(self.devices) < 2:
            return "one-gpu" if self.devices else "cpu"
        # A pair that can't reach each other is slower than any that can, whatever is between them.
        ranked = sorted(self.pairs, key=lambda pair: (pair.gbs or 0.0, pair.kind))
        slowest, fastest = ranked[0].kind, ranked[-1].kind
        return slowest if slowest == fastest else f"{slowest}+{fastest}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine of a measurement. `processor`: name of the GPU or CPU; `topology`: see `Topology.key`."""

    backend: str
    processor: str
    topology: str
    ranks: int

    @property
    def file_name(self) -> str:
        words = f"{self.backend} {self.processor} {self.topology} {self.ranks} ranks"
        return re.sub(r"[^a-z0-9+.]+", "-", words.lower()) + ".json"


def _nominal(gbs: float | None) -> str:
    if gbs is None:
        return "unknown"
    nearest = min(_NOMINAL_GBS, key=lambda nominal: abs(nominal - gbs))
    return str(nearest if abs(nearest - gbs) <= nearest / 10 else round(gbs))


def bare(uuid: str) -> str:
    """The UUID in a form common to the driver and torch."""
    return uuid.lower().removeprefix("gpu-")
