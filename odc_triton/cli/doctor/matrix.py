"""The picture of `odc-triton topo`: the links between GPUs, their speed, access and atomics."""

from __future__ import annotations

import textwrap

from ...base.report import in_columns
from ...machine.topology import Gpu, Pair, PciePath, Topology
from ...machine.unusable import unusable_pairs
from .findings import WIDTH, count, dotted, wrap

_MARKS = {
    "+": "can share a model's shards: access and native atomics",
    "-": "access, but no native atomics",
    "x": "no access",
    "?": "unknown",
}
_ROUTES = {
    PciePath.SELF: "on one board",
    PciePath.PIX: "through one PCIe switch",
    PciePath.PXB: "through several PCIe switches",
    PciePath.PHB: "through one host bridge",
    PciePath.NODE: "through the host bridges of one NUMA node",
    PciePath.SYS: "from socket to socket",
}


def draw_matrix(topology: Topology) -> str:
    """The link of each pair of GPUs, its speed, and whether they can share a model's shards; at most 100 columns."""
    devices = topology.devices
    if not devices:
        return f"{topology.key}: no GPU, {topology.missing or 'the driver shows none'}"
    versions = f", driver {topology.driver_version}, CUDA {topology.cuda_version}" if topology.driver_version else ""
    lines = [f"{topology.key}: {count(len(devices), 'GPU')}{versions}", ""]
    is_wide = len(devices) <= 8
    label = max(len(device.label) for device in devices)
    wide = max(10 if is_wide else 4, label)
    block = (WIDTH - label - 1) // (wide + 1)
    for start in range(0, len(devices) if len(devices) > 1 else 0, block):
        columns = devices[start : start + block]
        lines.append(" " * label + " " + " ".join(f"{column.label:^{wide}}" for column in columns).rstrip())
        for row in devices:
            cells = (_cell(topology.pair(row, column), is_wide) for column in columns)
            lines.append(f"{row.label:<{label}} " + " ".join(f"{cell:>{wide}}" for cell in cells).rstrip())
        lines.append("")
    if len(devices) > 1:
        lines += [*_legend(topology, is_wide), ""]
    return "\n".join(lines + _device_lines(devices))


def _mark(pair: Pair) -> str:
    if pair.access.is_refused:
        return "x"
    if pair.atomics.is_refused:
        return "-"
    return "?" if pair.is_partly_unknown else "+"


def _cell(pair: Pair | None, is_wide: bool) -> str:
    if pair is None:
        return ".    " if is_wide else "."
    gbs = "" if pair.gbs is None else f"{pair.gbs:.0f}"
    return f"{_joined(pair):<4} {gbs:>3} {_mark(pair)}" if is_wide else f"{gbs}{_mark(pair)}"


def _joined(pair: Pair) -> str:
    if pair.nvlinks:
        return f"NV{pair.nvlinks}"
    return "" if pair.path is PciePath.UNKNOWN else pair.path.name


def _device_lines(devices: tuple[Gpu, ...]) -> list[str]:
    # GPU numbers are nvidia-smi's; CUDA's depend on masks and on CUDA_DEVICE_ORDER.
    rows = [("", "CUDA", "name", "cc", "memory", "PCIe", "PCI bus")]
    for device in devices:
        generation, lanes = device.pcie
        rows.append(
            (
                device.label,
                "masked" if device.cuda_index is None else f"cuda:{device.cuda_index}",
                textwrap.shorten(device.name.removeprefix("NVIDIA "), 28, placeholder="..."),
                dotted(device.compute_capability),
                f"{device.memory_bytes / (1 << 30):.3g} GiB" if device.memory_bytes else "?",
                f"gen{generation} x{lanes}" if generation and lanes else "?",
                (device.bus_id or "?").removeprefix("0000"),
            )
        )
    return in_columns(rows)


def _legend(topology: Topology, is_wide: bool) -> list[str]:
    lines = ["Numbers are GB/s per direction."]
    if is_wide:
        lines += _link_legend(topology)
    marks = {_mark(pair) for pair in topology.pairs}
    bad = unusable_pairs(topology)
    for mark, words in _MARKS.items():
        if mark not in marks:
            continue
        lines.append(f"  {mark}     {words}" + (f": {topology.missing}" if mark == "?" and topology.missing else ""))
        for (reason, remedy), pairs in bad.items():
            if _mark(pairs[0]) == mark:
                lines += wrap(reason, " " * 8, " " * 8)
                lines += wrap(remedy, " " * 8 + "-> ", " " * 11)
    return lines


def _link_legend(topology: Topology) -> list[str]:
    lines = []
    linked = [pair for pair in topology.pairs if pair.nvlinks]
    if linked:
        through = sorted({"through NVSwitch" if pair.through_switch else "direct" for pair in linked})
        rates = sorted({pair.link_gbs for pair in linked if pair.link_gbs is not None})
        each = "; ".join(f"{gbs:g} each at line rate" for gbs in rates)
        lines.append(f"  NV#   # NVLinks, {' or '.join(through)}" + f" ({each})" * bool(each))
    paths = sorted({pair.path for pair in topology.pairs if _joined(pair) == pair.path.name})
    return lines + [f"  {path.name:<4}  {_ROUTES[path]}" for path in paths]
