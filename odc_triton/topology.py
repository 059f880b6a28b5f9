"""Which GPUs there are, how fast they reach each other, and which can't add to each other's memory. Pure.

Numbers of NVML's enumerations are those of nvml.h (nvmlGpuP2PStatus_t, nvmlGpuTopologyLevel_t, nvmlGpuFabricState_t).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import combinations

from .nvml import CudaDevice, DeviceAnswers, DriverNvml, LinkAnswers, Nvml, PairAnswers, cuda_devices, visible_names


class P2P(IntEnum):
    """Whether one GPU may do something to another's memory, and if not, why."""

    OK = 0
    CHIPSET_NOT_SUPPORTED = 1
    GPU_NOT_SUPPORTED = 2
    TOPOLOGY_NOT_SUPPORTED = 3
    DISABLED_BY_REGKEY = 4
    NOT_SUPPORTED = 5
    UNKNOWN = 6


_FINE = {P2P.OK, P2P.UNKNOWN}


class PciePath(IntEnum):
    """What lies between two GPUs on PCIe, in nvidia-smi's abbreviations: the further, the larger."""

    SELF = 0  # one board
    PIX = 10  # one PCIe switch
    PXB = 20  # several PCIe switches, no host bridge
    PHB = 30  # a host bridge
    NODE = 40  # several host bridges of one NUMA node
    SYS = 50  # two sockets
    UNKNOWN = 99


# GB/s per direction and link at line rate, as the driver gives it (`nvidia-smi nvlink -s`) for a compute capability.
# For drivers that do not, or give nonsense.
_NVLINK_GBS = {
    (6, 0): 19.531,
    (7, 0): 25.781,
    (7, 5): 25.781,
    (8, 0): 25.0,
    (8, 6): 14.062,
    (9, 0): 26.562,
    (10, 0): 53.125,
    (10, 3): 53.125,
}
_SANE_GBS = (10.0, 250.0)
_NOMINAL_GBS = (14, 20, 25, 50, 100)  # without the line code: what data sheets name, the same for all drivers
_PCIE_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_TO_GPU, _TO_SWITCH, _TO_UNKNOWN = 0, 2, 255
_FABRIC_STARTING = {1: "not started", 2: "starting"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or one MIG slice of `parent`. `index` is nvidia-smi's, `cuda_index` this process's, None if masked.

    `nvlinks` of `nvlinks_present` are active. PCIe numbers are (generation, lanes), now and at most in this machine:
    an idle GPU lowers its generation. `numa_nodes` and `cpus` are those next to it, as `0-3,8`.
    """

    label: str
    index: int
    uuid: str
    cuda_index: int | None = None
    name: str = "GPU"
    parent: str | None = None
    bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    pcie: tuple[int | None, int | None] = (None, None)
    pcie_max: tuple[int | None, int | None] = (None, None)
    numa_nodes: str | None = None
    cpus: str | None = None
    nvlinks: int = 0
    nvlinks_present: int = 0
    fabric: str | None = None

    @property
    def pcie_gbs(self) -> float | None:
        """GB/s per direction that its slot can carry."""
        generation, lanes = self.pcie_max
        return _PCIE_LANE_GBS[generation] * lanes if generation in _PCIE_LANE_GBS and lanes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two GPUs. `nvlinks` join them, through NVSwitch or directly, each of `link_gbs` GB/s per direction.

    `link_gbs_from`: "driver", or "table" where the driver does not say. `pcie_gbs` is of the slower one's slot.
    """

    one: Device
    other: Device
    read: P2P = P2P.UNKNOWN
    write: P2P = P2P.UNKNOWN
    atomics: P2P = P2P.UNKNOWN
    path: PciePath = PciePath.UNKNOWN
    nvlinks: int = 0
    through_switch: bool = False
    link_gbs: float | None = None
    link_gbs_from: str | None = None
    pcie_gbs: float | None = None

    @property
    def access(self) -> P2P:
        """To read and to write: the first of the two that fails."""
        return self.write if self.read in _FINE else self.read

    @property
    def gbs(self) -> float | None:
        """GB/s per direction, over all that joins them; None if unknown or unreachable."""
        if self.access not in _FINE:
            return None
        if self.nvlinks:
            return None if self.link_gbs is None else self.nvlinks * self.link_gbs
        return self.pcie_gbs

    @property
    def is_unusable(self) -> bool:
        """What is unknown is not refused: opening the heap will tell."""
        return not {self.read, self.write, self.atomics} <= _FINE

    @property
    def kind(self) -> str:
        """A word for tables: `nvswitch-18x25`, `nvlink-4x25`, `pcie-gen4x16`, `mig`, `unknown`."""
        if self.one.parent or self.other.parent:
            return "mig"
        if self.nvlinks:
            return f"{'nvswitch' if self.through_switch else 'nvlink'}-{self.nvlinks}x{_nominal(self.link_gbs)}"
        slots = [device.pcie_max for device in (self.one, self.other) if device.pcie_gbs]
        slower = min(slots, key=lambda slot: _PCIE_LANE_GBS[slot[0]] * slot[1], default=None)
        return "unknown" if slower is None or self.path is PciePath.UNKNOWN else f"pcie-gen{slower[0]}x{slower[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A pair of GPUs that can't hold shards of one model, why not, and what to do."""

    pair: Pair
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All GPUs that the driver shows, masked or not, and all pairs of them.

    `missing`: why the driver could not be asked; what CUDA says stands in then. `lost`: GPUs that don't answer.
    """

    devices: tuple[Device, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    missing: str | None = None
    lost: tuple[str, ...] = ()

    def only(self, uuids: Iterable[str | None]) -> Topology:
        """The part that these GPUs make. UUIDs may lack their `GPU-`, as torch's do; unknown ones are left out."""
        wanted = {_bare(uuid) for uuid in uuids if uuid is not None}
        kept = tuple(device for device in self.devices if _bare(device.uuid) in wanted)
        pairs = tuple(pair for pair in self.pairs if pair.one in kept and pair.other in kept)
        return replace(self, devices=kept, pairs=pairs)

    def visible(self) -> Topology:
        """The part that CUDA shows this process."""
        return self.only(device.uuid for device in self.devices if device.cuda_index is not None)

    def pair(self, one: Device, other: Device) -> Pair | None:
        return next((pair for pair in self.pairs if {pair.one.uuid, pair.other.uuid} == {one.uuid, other.uuid}), None)

    @property
    def key(self) -> str:
        """Names what joins these GPUs, for tables: `cpu`, `one-gpu`, or the slowest pair's kind.

        Where some pairs are joined faster it is `slowest+fastest`: `pcie-gen4x16+nvlink-4x14`. The same whatever the
        order of the GPUs, their number, and the driver. Of a job, ask it of `only(uuids of all ranks)`.
        """
        if len(self.devices) < 2:
            return "one-gpu" if self.devices else "cpu"
        # A pair that can't reach each other is slower than any that can, whatever lies between.
        ranked = sorted(self.pairs, key=lambda pair: (pair.gbs or 0.0, pair.kind))
        slowest, fastest = ranked[0].kind, ranked[-1].kind
        return slowest if slowest == fastest else f"{slowest}+{fastest}"


def read_topology(
    nvml: Nvml | None = None, cuda: Sequence[CudaDevice] | None = None, names: Sequence[str] | None = None
) -> Topology:
    """Asks `nvml` (the driver) what there is and `cuda` (torch) what this process sees of it.

    `names` are the entries of CUDA_VISIBLE_DEVICES: they tell MIG slices apart where CUDA gives the whole GPU's UUID.
    """
    driver = DriverNvml() if nvml is None else nvml
    try:
        seen = cuda_devices() if cuda is None else cuda
        names = visible_names() if names is None and cuda is None else names
        if driver.missing is not None:
            return _from_cuda(seen, driver.missing)
        answers = driver.devices()
        found = [device for device in answers if device.error is None]
        numbers = _cuda_numbers(found, seen, names)
        devices = {device.uuid: _device(device, numbers.get(device.uuid)) for device in found}
        pairs = tuple(
            _pair(one, other, driver.pair(one.uuid, other.uuid), devices, {device.bus_id for device in found})
            for one, other in combinations(found, 2)
        )
        return Topology(
            devices=tuple(devices.values()),
            pairs=pairs,
            driver_version=driver.driver_version(),
            cuda_version=driver.cuda_version(),
            lost=tuple(f"GPU{device.index}: {device.error}" for device in answers if device.error is not None),
        )
    finally:
        if isinstance(driver, DriverNvml) and nvml is None:
            driver.close()


def _from_cuda(seen: Sequence[CudaDevice], missing: str) -> Topology:
    devices = [
        Device(
            label=f"GPU{each.index}",
            index=each.index,
            cuda_index=each.index,
            uuid=each.uuid,
            name=each.name,
            bus_id=each.bus_id,
            compute_capability=each.compute_capability,
            memory_bytes=each.memory_bytes,
        )
        for each in seen
    ]
    pairs = []
    for (one, first), (other, second) in combinations(zip(devices, seen, strict=True), 2):
        reach = P2P.UNKNOWN
        if first.peers is not None and second.peers is not None:
            both = second.index in first.peers and first.index in second.peers
            reach = P2P.OK if both else P2P.NOT_SUPPORTED
        pairs.append(Pair(one=one, other=other, read=reach, write=reach))
    return Topology(devices=tuple(devices), pairs=tuple(pairs), missing=missing)


def _cuda_numbers(
    found: Sequence[DeviceAnswers], seen: Sequence[CudaDevice], names: Sequence[str] | None
) -> dict[str, int]:
    """CUDA's number of each GPU that it shows, by UUID: never by position, which masks and CUDA_DEVICE_ORDER change."""
    numbers: dict[str, int] = {}
    for device in seen:
        same = [each for each in found if _bare(each.uuid) == _bare(device.uuid)]
        if not same:
            named = names[device.index] if names is not None and device.index < len(names) else None
            slices = [each for each in found if each.parent and _bare(each.parent) == _bare(device.uuid)]
            same = [each for each in slices if each.uuid == named] or slices[: len(slices) == 1]
        if not same and device.bus_id is not None:
            here = [each for each in found if each.parent is None and _bus(each.bus_id) == _bus(device.bus_id)]
            same = here[: len(here) == 1]
        if same:
            numbers[same[0].uuid] = device.index
    return numbers


def _device(answers: DeviceAnswers, cuda_index: int | None) -> Device:
    return Device(
        label=f"GPU{answers.index}" + ("" if answers.mig is None else f":{answers.mig}"),
        index=answers.index,
        cuda_index=cuda_index,
        uuid=answers.uuid,
        name=answers.name or "GPU",
        parent=answers.parent,
        bus_id=answers.bus_id,
        compute_capability=answers.compute_capability,
        memory_bytes=answers.memory_bytes,
        pcie=(answers.pcie_generation, answers.pcie_width),
        pcie_max=(answers.pcie_generation_max, answers.pcie_width_max),
        numa_nodes=answers.numa_nodes,
        cpus=answers.cpus,
        nvlinks=sum(link.active == 1 for link in answers.links),
        nvlinks_present=len(answers.links),
        fabric=_FABRIC_STARTING.get(answers.fabric_state or 0),
    )


def _pair(
    one: DeviceAnswers,
    other: DeviceAnswers,
    answers: PairAnswers,
    devices: dict[str, Device],
    bus_ids: set[str | None],
) -> Pair:
    first, second = devices[one.uuid], devices[other.uuid]
    if first.parent or second.parent:
        # Slices reach no peer: NVIDIA MIG user guide, "application considerations".
        none = P2P.NOT_SUPPORTED
        path = PciePath.SELF if first.bus_id == second.bus_id else PciePath.UNKNOWN
        return Pair(one=first, other=second, read=none, write=none, atomics=none, path=path)
    links, through_switch = _links_between(one, other, answers, bus_ids)
    gbs, gbs_from = _link_gbs(links, (first, second))
    atomics = _status(answers.atomics)
    if atomics is P2P.UNKNOWN and links and all(link.atomics == 1 for link in links):
        atomics = P2P.OK
    slots = [device.pcie_gbs for device in (first, second)]
    return Pair(
        one=first,
        other=second,
        read=_status(answers.read),
        write=_status(answers.write),
        atomics=atomics,
        path=PciePath(answers.ancestor) if answers.ancestor in PciePath._value2member_map_ else PciePath.UNKNOWN,
        nvlinks=len(links) // 2,
        through_switch=through_switch,
        link_gbs=gbs if links else None,
        link_gbs_from=gbs_from if links else None,
        pcie_gbs=None if None in slots else min(slots),
    )


def _links_between(
    one: DeviceAnswers, other: DeviceAnswers, answers: PairAnswers, bus_ids: set[str | None]
) -> tuple[list[LinkAnswers], bool]:
    """The active links at both ends, as many of the one's as of the other's, and whether a switch is between."""
    known = {_bus(bus_id) for bus_id in bus_ids}

    def ends(device: DeviceAnswers, peer: DeviceAnswers) -> tuple[list[LinkAnswers], list[LinkAnswers]]:
        active = [link for link in device.links if link.active == 1]
        direct = [link for link in active if _bus(link.remote_bus_id) == _bus(peer.bus_id)]
        # A virtual machine hides what is at a link's other end.
        hidden = [link for link in active if link.remote_type in (None, _TO_UNKNOWN)]
        away = [link for link in hidden if _bus(link.remote_bus_id) not in known and answers.nvlink == P2P.OK]
        return direct, [link for link in active if link.remote_type == _TO_SWITCH] + away

    (direct, switched), (direct_back, switched_back) = ends(one, other), ends(other, one)
    count = min(len(direct), len(direct_back))
    if count:
        return direct[:count] + direct_back[:count], False
    # Both ends may be on switches that do not join them: another partition of the fabric.
    count = min(len(switched), len(switched_back)) if answers.nvlink in (None, P2P.OK, P2P.UNKNOWN) else 0
    return switched[:count] + switched_back[:count], count > 0


def _link_gbs(links: Sequence[LinkAnswers], devices: tuple[Device, Device]) -> tuple[float | None, str | None]:
    said = [link.speed_mbps / 1000 for link in links if link.speed_mbps is not None]
    if links and len(said) == len(links) and all(_SANE_GBS[0] <= gbs <= _SANE_GBS[1] for gbs in said):
        return min(said), "driver"
    table = [_NVLINK_GBS.get(device.compute_capability or (0, 0)) for device in devices]
    return (None, None) if None in table else (min(table), "table")


def _nominal(gbs: float | None) -> str:
    if gbs is None:
        return "unknown"
    nearest = min(_NOMINAL_GBS, key=lambda nominal: abs(nominal - gbs))
    return str(nearest if abs(nearest - gbs) <= nearest / 10 else round(gbs))


def _status(number: int | None) -> P2P:
    return P2P(number) if number in P2P._value2member_map_ else P2P.UNKNOWN


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _bus(bus_id: str | None) -> str | None:
    """`00000000:17:00.0` however many digits its domain is written with."""
    if bus_id is None or bus_id.count(":") != 2:
        return bus_id
    domain, bus, rest = bus_id.lower().split(":")
    return f"{int(domain, 16):08x}:{bus}:{rest}"


_WHY = {
    P2P.CHIPSET_NOT_SUPPORTED: "the chipset between them does not carry it",
    P2P.GPU_NOT_SUPPORTED: "this model of GPU does not offer it",
    P2P.TOPOLOGY_NOT_SUPPORTED: "they hang on different PCIe roots",
    P2P.DISABLED_BY_REGKEY: "the driver's settings switch it off",
    P2P.NOT_SUPPORTED: "the driver does not offer it",
}


def unusable_pairs(topology: Topology) -> tuple[Unusable, ...]:
    """The pairs that can't read, write or natively add to each other's memory. What is unknown is not among them."""
    groups = usable_groups(topology)
    return tuple(_unusable(pair, groups) for pair in topology.pairs if pair.is_unusable)


def usable_groups(topology: Topology) -> tuple[tuple[Device, ...], ...]:
    """The GPUs in groups within which every pair is usable, larger groups first."""
    broken = {frozenset((pair.one.uuid, pair.other.uuid)) for pair in topology.pairs if pair.is_unusable}
    groups: list[list[Device]] = []
    for device in topology.devices:
        fits = (group for group in groups if not any(frozenset((device.uuid, o.uuid)) in broken for o in group))
        group = next(fits, None)
        if group is None:
            groups.append([device])
        else:
            group.append(device)
    return tuple(tuple(group) for group in sorted(groups, key=len, reverse=True))


def _unusable(pair: Pair, groups: Sequence[Sequence[Device]]) -> Unusable:
    if pair.one.parent or pair.other.parent:
        return Unusable(
            pair=pair,
            reason="MIG slices can't reach each other's memory",
            remedy="give all ranks one slice, or switch MIG off (`nvidia-smi -i N -mig 0`)",
        )
    stalled = next((device for device in (pair.one, pair.other) if device.fabric), None)
    if stalled is not None:
        return Unusable(
            pair=pair,
            reason=f"the NVSwitch fabric is {stalled.fabric} for {stalled.label}",
            remedy="start nvidia-fabricmanager, of the driver's version, on the host, and look at its log",
        )
    group = groups[0]
    numbers = ",".join(str(device.index) for device in group)
    instead = "use one GPU (several ranks may share it)"
    if len(group) > 1:
        instead = f"use GPUs that can: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={numbers}"
    if pair.access in _FINE:
        over = "over NVLink" if pair.nvlinks else "over PCIe"
        return Unusable(
            pair=pair,
            reason=f"no native atomics {over} ({_WHY[pair.atomics]}), so gradients can't be added there",
            remedy=instead if pair.nvlinks else f"{instead}; in general only NVLink has native atomics",
        )
    what = "write to" if pair.read in _FINE else "read"
    first = {
        P2P.CHIPSET_NOT_SUPPORTED: "switch the IOMMU off or to passthrough (iommu=pt) and PCIe ACS off, or ",
        P2P.DISABLED_BY_REGKEY: "remove the driver's peer-to-peer options (/etc/modprobe.d, NVreg_*), or ",
        P2P.NOT_SUPPORTED: "in a virtual machine or container ask the host for peer-to-peer GPUs, or ",
    }.get(pair.access, "")
    return Unusable(
        pair=pair, reason=f"they can't {what} each other's memory: {_WHY[pair.access]}", remedy=f"{first}{instead}"
    )


def refuse_unusable(topology: Topology, uuids_of_ranks: Sequence[str | None]) -> None:
    """Raises RuntimeError with pair, reason and remedy if two ranks' GPUs can't reach or add to each other.

    `uuids_of_ranks`: by rank, as torch gives them. Ranks on one GPU are fine. None (no GPU) and GPUs that this driver
    does not show are passed over: opening the heap tells about those.
    """
    part = topology.only(uuids_of_ranks)
    bad = unusable_pairs(part)
    if not bad:
        return
    first = bad[0]
    ranks = {_bare(uuid): rank for rank, uuid in reversed(list(enumerate(uuids_of_ranks))) if uuid is not None}
    names = [
        f"rank {ranks[_bare(device.uuid)]} on {device.label} ({device.name}, {device.bus_id or device.uuid})"
        for device in sorted((first.pair.one, first.pair.other), key=lambda device: ranks[_bare(device.uuid)])
    ]
    more = f" So it is with {len(bad)} of {len(part.pairs)} pairs." if len(bad) > 1 else ""
    raise RuntimeError(
        f"{names[0]} and {names[1]} can't hold shards of one model: {first.reason}. "
        f"{first.remedy[0].upper()}{first.remedy[1:]}.{more} `odc-triton topo` shows all pairs."
    )
