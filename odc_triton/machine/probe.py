"""Reads the topology of GPUs and links from the driver, or a file of its answers, and torch's CUDA.

This module interprets NVML's numbers (nvml.h); topology.py has those of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from .nvml import ask_driver
from .topology import P2P, Gpu, Pair, Topology, bare

# GB/s per direction and link at line rate by compute capability, as drivers report it (`nvidia-smi nvlink -s`). For
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

Answers = Mapping[str, Any]  # as in nvml.py


def read_topology(answers: Answers | None = None, cuda: Sequence[VisibleDevice] | None = None) -> Topology:
    """The topology in the driver's `answers`, or a file of them, and the part visible to this process, by `cuda`.

    By default queries the driver and torch. Raises KeyError, TypeError, IndexError for a file in another form.
    """
    answers = ask_driver() if answers is None else answers
    cuda = cuda_devices() if cuda is None else cuda
    if answers.get("missing") is not None:
        return _from_cuda(cuda, answers["missing"])
    entries = answers.get("devices", ())
    found = {place: entry for place, entry in enumerate(entries) if entry.get("error") is None}
    numbers = {bare(each.uuid): each.index for each in cuda}
    devices = {place: _device(entry, numbers.get(bare(entry["uuid"]))) for place, entry in found.items()}
    of = {frozenset(pair): entry for entry in answers.get("pairs", ()) for pair in entry["of"]}
    buses = {_bus(entry.get("bus_id")) for entry in found.values()}
    return Topology(
        devices=tuple(devices.values()),
        pairs=tuple(
            _pair((found[a], found[b]), (devices[a], devices[b]), of.get(frozenset((a, b)), {}), buses)
            for a, b in combinations(found, 2)
        ),
        driver_version=answers.get("driver_version"),
        cuda_version=answers.get("cuda_version"),
        lost=tuple(f"GPU{entry['index']}: {entry['error']}" for entry in entries if entry.get("error") is not None),
    )


def _from_cuda(seen: Sequence[VisibleDevice], missing: str) -> Topology:
    devices, pairs = tuple(replace(each, cuda_index=each.index) for each in seen), []
    for one, other in combinations(devices, 2):
        reach = P2P.OK if other.index in one.peers and one.index in other.peers else P2P.NOT_SUPPORTED
        pairs.append(Pair(one=one, other=other, read=reach, write=reach))
    return Topology(devices=devices, pairs=tuple(pairs), missing=missing)


def _device(answers: Answers, cuda_index: int | None) -> Gpu:
    capability = answers.get("compute_capability")
    return Gpu(
        index=answers["index"],
        cuda_index=cuda_index,
        uuid=answers["uuid"],
        name=answers.get("name") or "GPU",
        bus_id=answers.get("bus_id"),
        compute_capability=None if capability is None else tuple(capability),
        memory_bytes=answers.get("memory_bytes"),
        pcie=(answers.get("pcie_generation_max"), answers.get("pcie_width_max")),
    )


def _pair(both: tuple[Answers, Answers], devices: tuple[Gpu, Gpu], answers: Answers, buses: set[str | None]) -> Pair:
    links, through_switch = _links_between(*both, P2P(answers.get("nvlink")), buses)
    atomics = P2P(answers.get("atomics"))
    if atomics is P2P.UNKNOWN and links and all(link.get("atomics") == 1 for link in links):
        atomics = P2P.OK
    return Pair(
        one=devices[0],
        other=devices[1],
        read=P2P(answers.get("read")),
        write=P2P(answers.get("write")),
        atomics=atomics,
        nvlinks=len(links) // 2,
        through_switch=through_switch,
        link_gbs=_link_gbs(links, devices) if links else None,
    )


def _links_between(one: Answers, other: Answers, reach: P2P, buses: set[str | None]) -> tuple[list[Answers], bool]:
    """(active links at both ends, the same number of each; True if a switch is between them).

    `buses`: those of all GPUs, in `_bus`'s form.
    """

    def ends(device: Answers, peer: Answers) -> tuple[list[Answers], list[Answers]]:
        active = [link for link in device.get("links", ()) for _ in range(link.get("count", 1)) if link["active"] == 1]
        far = [link.get("remote_bus_id") for link in active]
        direct = [link for link, bus in zip(active, far, strict=True) if bus and _bus(bus) == _bus(peer.get("bus_id"))]
        # A virtual machine hides the other end of a link.
        hidden = [link for link in active if link.get("remote_type") in (None, _TO_UNKNOWN)]
        away = [link for link in hidden if _bus(link.get("remote_bus_id")) not in buses and reach is P2P.OK]
        return direct, [link for link in active if link.get("remote_type") == _TO_SWITCH] + away

    (direct, switched), (direct_back, switched_back) = ends(one, other), ends(other, one)
    count = min(len(direct), len(direct_back))
    if count:
        return direct[:count] + direct_back[:count], False
    # Both ends may be on switches that don't connect them: another partition of the fabric.
    count = 0 if reach.is_refused else min(len(switched), len(switched_back))
    return switched[:count] + switched_back[:count], count > 0


def _link_gbs(links: Sequence[Answers], devices: tuple[Gpu, Gpu]) -> float | None:
    reported = [(link.get("speed_mbps") or 0) / 1000 for link in links]
    if all(_SANE_GBS[0] <= gbs <= _SANE_GBS[1] for gbs in reported):
        return min(reported)
    one, other = (_NVLINK_GBS.get(device.compute_capability or (0, 0)) for device in devices)
    return None if one is None or other is None else min(one, other)


def _bus(bus_id: str | None) -> str | None:
    """A bus id such as `00000000:17:00.0`, for any number of digits in its domain."""
    if bus_id is None or bus_id.count(":") != 2:
        return bus_id
    domain, bus, rest = bus_id.lower().split(":")
    return f"{int(domain, 16):08x}:{bus}:{rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevice(Gpu):
    """A GPU as CUDA numbers it in this process: `index`. `peers`: the indices whose memory it can map."""

    peers: tuple[int, ...] = ()


def cuda_devices() -> tuple[VisibleDevice, ...]:
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
        found.append(
            VisibleDevice(
                index=index,
                uuid=str(properties.uuid),
                name=properties.name,
                compute_capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
                peers=tuple(j for j in indices if j != index and torch.cuda.can_device_access_peer(index, j)),
            )
        )
    return tuple(found)
