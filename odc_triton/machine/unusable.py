"""Pairs of GPUs that can't hold shards of one model, with reason and remedy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .topology import P2P, Gpu, Pair, Topology, bare

_WHY = {
    P2P.CHIPSET_NOT_SUPPORTED: "the chipset between them does not carry it",
    P2P.GPU_NOT_SUPPORTED: "this model of GPU does not offer it",
    P2P.TOPOLOGY_NOT_SUPPORTED: "they are on different PCIe roots",
    P2P.DISABLED_BY_REGKEY: "the driver's settings turn it off",
    P2P.NOT_SUPPORTED: "the driver does not offer it",
}
_FIRST_TRY = {
    P2P.CHIPSET_NOT_SUPPORTED: "turn the IOMMU off or to passthrough (iommu=pt) and PCIe ACS off, or ",
    P2P.DISABLED_BY_REGKEY: "remove the driver's peer-to-peer options (/etc/modprobe.d, NVreg_*), or ",
    P2P.NOT_SUPPORTED: "start nvidia-fabricmanager (NVSwitch), have a virtual machine's host enable peers, or ",
}


def unusable_pairs(topology: Topology) -> dict[tuple[str, str], list[Pair]]:
    """By (reason, remedy) the pairs known to be unable to read, write or natively add to each other's memory.

    Remedies keep the GPUs' order if they can.
    """
    bad = [pair for pair in topology.pairs if pair.is_unusable]
    instead = _instead(usable_groups(topology), topology.devices) if bad else ""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in bad:
        found.setdefault(_why(pair, instead), []).append(pair)
    return found


def usable_groups(topology: Topology) -> tuple[tuple[Gpu, ...], ...]:
    """The GPUs in groups in which every pair is usable, larger groups first."""
    broken = {frozenset((pair.one.uuid, pair.other.uuid)) for pair in topology.pairs if pair.is_unusable}
    groups: list[list[Gpu]] = []
    for device in topology.devices:
        for group in groups:
            if not any(frozenset((device.uuid, other.uuid)) in broken for other in group):
                group.append(device)
                break
        else:
            groups.append([device])
    return tuple(tuple(group) for group in sorted(groups, key=len, reverse=True))


def _instead(groups: Sequence[Sequence[Gpu]], order: Sequence[Gpu]) -> str:
    """The remedy for GPUs in these groups, larger ones first. `order`: that of the ranks."""
    size = len(groups[0])
    largest = [group for group in groups if len(group) == size]
    together = [device for group in largest for device in group]
    visible = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={','.join(str(each.index) for each in together)}"
    if size == 1:
        return "use one GPU (several ranks may share it)"
    if len(largest) == 1:
        return f"use GPUs that can: {visible}"
    copies = (
        f"{len(largest)} groups of {size} GPUs can: give --replicas {len(largest)}, or fully_shard a mesh of shape "
        f'({len(largest)}, {size}) named ("replicate", "shard")'
    )
    return copies if together == list(order) else f"{copies}, and keep each group's ranks together: {visible}"


def _why(pair: Pair, instead: str) -> tuple[str, str]:
    if not pair.access.is_refused:
        over = "over NVLink" if pair.nvlinks else "over PCIe"
        reason = f"no native atomics {over} ({_WHY[pair.atomics]}), so gradients can't be added there"
        return reason, instead if pair.nvlinks else f"{instead}; in general only NVLink has native atomics"
    what = "read" if pair.read.is_refused else "write to"
    reason = f"they can't {what} each other's memory: {_WHY[pair.access]}"
    return reason, f"{_FIRST_TRY.get(pair.access, '')}{instead}"


def refuse_unusable(topology: Topology, uuids_of_ranks: Sequence[str | None]) -> None:
    """Raises RuntimeError with pair, reason and remedy if two ranks' GPUs can't reach or add to each other.

    `uuids_of_ranks`: by rank, as torch gives them. Ranks may share a GPU. None (no GPU) and GPUs that this driver does
    not list are skipped: opening the heap will show whether they work.
    """
    part = topology.only(uuids_of_ranks)
    ranks = {bare(uuid): rank for rank, uuid in reversed(list(enumerate(uuids_of_ranks))) if uuid is not None}

    def rank_of(device: Gpu) -> int:
        return ranks[bare(device.uuid)]

    bad = unusable_pairs(replace(part, devices=tuple(sorted(part.devices, key=rank_of))))
    if not bad:
        return
    (reason, remedy), (first, *others) = next(iter(bad.items()))
    names = [
        f"rank {rank_of(device)} on {device.label} ({device.name}, {device.bus_id or device.uuid})"
        for device in sorted((first.one, first.other), key=rank_of)
    ]
    more = f" The same holds for {1 + len(others)} of {len(part.pairs)} pairs." if others else ""
    raise RuntimeError(
        f"{names[0]} and {names[1]} can't hold shards of one model: {reason}. {remedy[0].upper()}{remedy[1:]}.{more} "
        f"`odc-triton doctor` checks all pairs."
    )
