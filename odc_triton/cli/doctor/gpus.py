"""This machine's GPUs, the links between them, and the picture of `odc-triton topo`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ...base.report import in_columns
from ...machine.topology import Device, Pair, PciePath, Topology
from ...machine.unusable import by_reason, unusable_pairs, usable_groups
from .findings import NOTE, OK, PROBLEM, WIDTH, Finding, count, count_devices, dotted, size, wrap
from .system import System

_OLDEST_GPU = (8, 0)


def check_gpus(topology: Topology, system: System) -> Iterator[Finding]:
    seen = topology.visible().devices
    if topology.missing is not None and seen:
        yield Finding(
            NOTE,
            "GPUs",
            f"CUDA reports {count(len(seen), 'GPU')}; links and atomics are unknown: {topology.missing}",
            "pip install nvidia-ml-py; in a container NVIDIA_DRIVER_CAPABILITIES must have `utility`",
        )
    elif not topology.devices:
        on_bus = _on_bus(system)
        there = f"; {count(on_bus, 'NVIDIA GPU')} on the PCI bus, not accessible from here" if on_bus else ""
        yield Finding(
            NOTE,
            "GPUs",
            f"none{there}: {topology.missing or 'the driver shows no GPU'}. The CPU backend needs none",
            "install the driver, or start the container with its GPUs (`--gpus all`)" if on_bus else None,
        )
    else:
        masked = len(topology.devices) - len(seen)
        some = f", {len(seen)} of {len(topology.devices)} visible to this process" if masked else ""
        names = sorted({device.name for device in topology.devices})
        text = f"{count_devices(topology)} ({', '.join(names)}){some}; topology {topology.key}"
        if seen:
            yield Finding(OK, "GPUs", text)
        else:
            yield Finding(NOTE, "GPUs", text, "unset CUDA_VISIBLE_DEVICES, or install a torch that can use them")
    for device in seen:
        if device.compute_capability is not None and device.compute_capability < _OLDEST_GPU:
            yield Finding(
                PROBLEM,
                "GPUs",
                f"{device.label} ({device.name}) is of compute capability {dotted(device.compute_capability)}; "
                f"kernels need {dotted(_OLDEST_GPU)}",
                "use Ampere GPUs or newer, or backend='cpu'",
            )
    for each in topology.lost:
        yield Finding(PROBLEM, "GPUs", f"{each}: it is not usable", "see dmesg for Xid; reset or reboot")


def _on_bus(system: System) -> int:
    """NVIDIA's display controllers on the PCI bus, even without a driver; NVSwitches don't count."""
    folder = "/sys/bus/pci/devices"
    return sum(
        (system.read(f"{folder}/{name}/vendor") or "").strip() == "0x10de"
        and (system.read(f"{folder}/{name}/class") or "").startswith("0x03")
        for name in system.names(folder)
    )


def check_links(topology: Topology) -> Iterator[Finding]:
    best = max((device.nvlinks for device in topology.devices), default=0)
    for device in topology.devices:
        if best > 0 and device.nvlinks < min(best, device.nvlinks_present):
            yield Finding(
                NOTE,
                "NVLink",
                f"{device.label} has {device.nvlinks} of {device.nvlinks_present} links up, others {best}",
                f"see `nvidia-smi nvlink -s -i {device.index}` and dmesg for Xid 74",
            )
        lanes, most = device.pcie[1], device.pcie_max[1]
        if lanes and most and lanes < most:
            yield Finding(
                NOTE,
                "PCIe",
                f"{device.label} runs on {lanes} of {most} lanes",
                "check that the card is seated correctly, in a slot with all lanes",
            )


def check_peers(topology: Topology) -> Iterator[Finding]:
    part = topology.visible()
    if len(part.devices) < 2:
        # This process's job may use the other GPUs.
        if bad := unusable_pairs(topology):
            text = f"{len(bad)} of {len(topology.pairs)} pairs of this machine's GPUs can't share a model's shards"
            yield Finding(NOTE, "peers", text, "`odc-triton topo` shows which, and why")
    elif bad := unusable_pairs(part):
        for (reason, remedy), pairs in by_reason(bad).items():
            names = ", ".join(f"{pair.one.label}-{pair.other.label}" for pair in pairs[:4])
            more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
            text = f"{len(pairs)} of {count(len(part.pairs), 'pair')}: {reason} ({names}{more})"
            yield Finding(PROBLEM, "peers", text, remedy)
        groups = [" ".join(device.label for device in group) for group in usable_groups(part) if len(group) > 1]
        if groups:
            yield Finding(OK, "peers", f"these can share a model's shards: {'; '.join(groups)}")
    elif unknown := sum(pair.is_partly_unknown for pair in part.pairs):
        text = f"the driver does not say what {unknown} of {count(len(part.pairs), 'pair')} can do"
        yield Finding(NOTE, "peers", text, "python -m bench.suites.gpu tries them")
    else:
        speeds = sorted({round(pair.gbs) for pair in part.pairs if pair.gbs is not None})
        gbs = f", {speeds[0]}{f' to {speeds[-1]}' if len(speeds) > 1 else ''} GB/s per direction" if speeds else ""
        yield Finding(OK, "peers", f"all {len(part.pairs)} pairs: access and native atomics{gbs}")


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
    lines = [f"{topology.key}: {count_devices(topology)}{versions}", ""]
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


def _device_lines(devices: tuple[Device, ...]) -> list[str]:
    # GPU numbers are nvidia-smi's; CUDA's depend on masks and on CUDA_DEVICE_ORDER.
    rows = [("", "CUDA", "name", "cc", "memory", "PCIe", "PCI bus")]
    for device in devices:
        generation, lanes = device.pcie_max
        rows.append(
            (
                device.label,
                "masked" if device.cuda_index is None else f"cuda:{device.cuda_index}",
                textwrap.shorten(device.name.removeprefix("NVIDIA "), 28, placeholder="..."),
                dotted(device.compute_capability),
                size(device.memory_bytes) if device.memory_bytes else "?",
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
        for reason, remedy in by_reason(each for each in bad if _mark(each.pair) == mark):
            lines += wrap(reason, " " * 8, " " * 8)
            lines += wrap(remedy, " " * 8 + "-> ", " " * 11)
    return lines


def _link_legend(topology: Topology) -> list[str]:
    lines = []
    linked = [pair for pair in topology.pairs if pair.nvlinks]
    if linked:
        through = sorted({"through NVSwitch" if pair.through_switch else "direct" for pair in linked})
        rates = sorted({(pair.link_gbs, pair.link_gbs_from) for pair in linked if pair.link_gbs is not None})
        by = {"driver": "from the driver", "table": "from a table, as the driver does not say"}
        each = "; ".join(f"{gbs:g} each at line rate, {by[said]}" for gbs, said in rates)
        lines.append(f"  NV#   # NVLinks, {' or '.join(through)}" + f" ({each})" * bool(each))
    paths = sorted({pair.path for pair in topology.pairs if _joined(pair) == pair.path.name})
    return lines + [f"  {path.name:<4}  {_ROUTES[path]}" for path in paths]
