"""Asks the driver, and CUDA through torch, which GPUs there are and how they are linked.

This module interprets NVML's numbers (nvml.h); topology.py has the enumerations of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from .nvml import DeviceAnswers, DriverNvml, LinkAnswers, Nvml, PairAnswers
from .topology import P2P, Device, Pair, PciePath, Topology, bare

# GB/s per direction and link at line rate for a compute capability, as drivers report it (`nvidia-smi nvlink -s`). For
# drivers that don't report it, or report nonsense.
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
_TO_SWITCH, _TO_UNKNOWN = 2, 255  # from nvmlIntNvLinkDeviceType_t


def read_topology(nvml: Nvml | None = None, cuda: Sequence[CudaDevice] | None = None) -> Topology:
    """Asks `nvml` (the driver) what there is and `cuda` (torch) what this process sees of it."""
    if nvml is None:
        driver = DriverNvml()
        try:
            return read_topology(driver, cuda)
        finally:
            driver.close()
    if cuda is None:
        cuda = cuda_devices()
    if nvml.missing is not None:
        return _from_cuda(cuda, nvml.missing)
    answers = nvml.devices()
    found = [device for device in answers if device.error is None]
    numbers = _cuda_numbers(found, cuda)
    devices = {device.uuid: _device(device, numbers.get(device.uuid)) for device in found}
    buses = {_bus(device.bus_id) for device in found}
    return Topology(
        devices=tuple(devices.values()),
        pairs=tuple(
            _pair(one, other, nvml.pair(one.uuid, other.uuid), devices, buses) for one, other in combinations(found, 2)
        ),
        driver_version=nvml.driver_version(),
        cuda_version=nvml.cuda_version(),
        lost=tuple(f"GPU{device.index}: {device.error}" for device in answers if device.error is not None),
    )


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


def _cuda_numbers(found: Sequence[DeviceAnswers], seen: Sequence[CudaDevice]) -> dict[str, int]:
    """CUDA's number for each GPU that it shows, found by UUID: masks and CUDA_DEVICE_ORDER change positions."""
    numbers: dict[str, int] = {}
    for device in seen:
        same = [each for each in found if bare(each.uuid) == bare(device.uuid)]
        if not same and device.bus_id is not None:
            here = [each for each in found if _bus(each.bus_id) == _bus(device.bus_id)]
            same = here[: len(here) == 1]
        if same:
            numbers[same[0].uuid] = device.index
    return numbers


def _device(answers: DeviceAnswers, cuda_index: int | None) -> Device:
    return Device(
        label=f"GPU{answers.index}",
        index=answers.index,
        cuda_index=cuda_index,
        uuid=answers.uuid,
        name=answers.name or "GPU",
        bus_id=answers.bus_id,
        compute_capability=answers.compute_capability,
        memory_bytes=answers.memory_bytes,
        pcie=(answers.pcie_generation, answers.pcie_width),
        pcie_max=(answers.pcie_generation_max, answers.pcie_width_max),
        nvlinks=sum(link.active == 1 for link in answers.links),
        nvlinks_present=len(answers.links),
    )


def _pair(
    one: DeviceAnswers,
    other: DeviceAnswers,
    answers: PairAnswers,
    devices: dict[str, Device],
    buses: set[str | None],
) -> Pair:
    first, second = devices[one.uuid], devices[other.uuid]
    links, through_switch = _links_between(one, other, answers, buses)
    gbs, gbs_from = _link_gbs(links, (first, second)) if links else (None, None)
    atomics = P2P(answers.atomics)
    if atomics is P2P.UNKNOWN and links and all(link.atomics == 1 for link in links):
        atomics = P2P.OK
    return Pair(
        one=first,
        other=second,
        read=P2P(answers.read),
        write=P2P(answers.write),
        atomics=atomics,
        path=PciePath(answers.ancestor),
        nvlinks=len(links) // 2,
        through_switch=through_switch,
        link_gbs=gbs,
        link_gbs_from=gbs_from,
    )


def _links_between(
    one: DeviceAnswers, other: DeviceAnswers, answers: PairAnswers, buses: set[str | None]
) -> tuple[list[LinkAnswers], bool]:
    """The active links at both ends, the same number of each, and whether a switch is between them.

    `buses`: those of all GPUs, in `_bus`'s form.
    """
    reach = P2P(answers.nvlink)

    def ends(device: DeviceAnswers, peer: DeviceAnswers) -> tuple[list[LinkAnswers], list[LinkAnswers]]:
        active = [link for link in device.links if link.active == 1]
        direct = [link for link in active if link.remote_bus_id and _bus(link.remote_bus_id) == _bus(peer.bus_id)]
        # A virtual machine hides the other end of a link.
        hidden = [link for link in active if link.remote_type in (None, _TO_UNKNOWN)]
        away = [link for link in hidden if _bus(link.remote_bus_id) not in buses and reach is P2P.OK]
        return direct, [link for link in active if link.remote_type == _TO_SWITCH] + away

    (direct, switched), (direct_back, switched_back) = ends(one, other), ends(other, one)
    count = min(len(direct), len(direct_back))
    if count:
        return direct[:count] + direct_back[:count], False
    # Both ends may be on switches that don't connect them: another partition of the fabric.
    count = 0 if reach.is_refused else min(len(switched), len(switched_back))
    return switched[:count] + switched_back[:count], count > 0


def _link_gbs(links: Sequence[LinkAnswers], devices: tuple[Device, Device]) -> tuple[float | None, str | None]:
    said = [link.speed_mbps / 1000 for link in links if link.speed_mbps is not None]
    if len(said) == len(links) and all(_SANE_GBS[0] <= gbs <= _SANE_GBS[1] for gbs in said):
        return min(said), "driver"
    table = [_NVLINK_GBS.get(device.compute_capability or (0, 0)) for device in devices]
    return (None, None) if None in table else (min(table), "table")


def _bus(bus_id: str | None) -> str | None:
    """A bus id such as `00000000:17:00.0`, whatever the number of digits in its domain."""
    if bus_id is None or bus_id.count(":") != 2:
        return bus_id
    domain, bus, rest = bus_id.lower().split(":")
    return f"{int(domain, 16):08x}:{bus}:{rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A GPU as CUDA numbers it in this process. `peers`: the indices whose memory it can map, None if not asked."""

    index: int
    uuid: str
    name: str = ""
    bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    peers: tuple[int, ...] | None = None


def cuda_devices() -> tuple[CudaDevice, ...]:
    """The GPUs that CUDA shows this process, after CUDA_VISIBLE_DEVICES; none without torch or CUDA."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: one of torch's libraries does not load
        return ()
    if not torch.cuda.is_available():
        return ()
    indices = range(torch.cuda.device_count())
    found = []
    for index in indices:
        properties = torch.cuda.get_device_properties(index)
        place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        found.append(
            CudaDevice(
                index=index,
                uuid=str(properties.uuid),
                name=properties.name,
                bus_id=None if None in place else "{:08x}:{:02x}:{:02x}.0".format(*place),
                compute_capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
                peers=tuple(j for j in indices if j != index and torch.cuda.can_device_access_peer(index, j)),
            )
        )
    return tuple(found)
