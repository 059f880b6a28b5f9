"""Between which GPUs bench.suites.links measures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odc_triton.machine.topology import Gpu, Topology
from odc_triton.machine.unusable import unusable_pairs


@dataclass(frozen=True, kw_only=True)
class Place:
    """The GPUs between which to measure. `devices`: CUDA's numbers; none on the CPU. `gb_s`: what one rank's links
    carry one way, None if unknown. `refused`: why they can't be measured.
    """

    names: tuple[str, ...]
    devices: tuple[int, ...]
    kind: str
    gb_s: float | None
    refused: str | None = None


ON_CPU = Place(names=("process 0", "process 1"), devices=(), kind="shared memory", gb_s=None)


def places_of(topology: Topology, *, every_pair: bool) -> list[Place]:
    """One pair of each kind, then all GPUs that this process sees together, then perhaps the other pairs."""
    seen = topology.visible()
    reasons = {pair: reason for (reason, _), bad in unusable_pairs(seen).items() for pair in bad}
    pairs: dict[str, list[Place]] = {}
    for pair in seen.pairs:
        ends = pair.one, pair.other
        kind = f"{f'NV{pair.nvlinks}' if pair.nvlinks else pair.path.name} {pair.kind}"
        pairs.setdefault(kind, []).append(_place(ends, kind, pair.gbs, reasons.get(pair)))
    first = [of.pop(0) for of in pairs.values()]
    if len(seen.devices) > 2:
        first.append(_place(seen.devices, "all at once", _carried(seen), next(iter(reasons.values()), None)))
    return [*first, *(place for of in pairs.values() for place in of if every_pair)]


def _place(devices: Sequence[Gpu], kind: str, gb_s: float | None, refused: str | None) -> Place:
    names, numbers = zip(*((device.label, device.cuda_index) for device in devices), strict=True)
    return Place(names=names, devices=numbers, kind=kind, gb_s=gb_s, refused=refused)


def _carried(seen: Topology) -> float | None:
    """GB/s one way of all links of a GPU together, the least of all GPUs."""

    def of(device: Gpu) -> float:
        pairs = [pair for pair in seen.pairs if device in (pair.one, pair.other)]
        # Direct NVLinks lead to one peer each; a switch's and a slot's serve all peers.
        direct = all(pair.nvlinks and not pair.through_switch for pair in pairs)
        return (sum if direct else min)(pair.gbs or 0.0 for pair in pairs)

    return min(map(of, seen.devices)) or None
