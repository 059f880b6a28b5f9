"""The GPUs that there are, and what joins them."""

from __future__ import annotations

from collections.abc import Iterator

from ...machine.topology import Topology
from ...machine.unusable import by_reason, unusable_pairs, usable_groups
from .findings import NOTE, OK, PROBLEM, Finding
from .machine import System
from .words import count, count_devices, dotted

_OLDEST_GPU = (8, 0)


def check_gpus(topology: Topology, system: System) -> Iterator[Finding]:
    seen = topology.visible().devices
    if topology.missing is not None and seen:
        yield Finding(
            NOTE,
            "GPUs",
            f"{count(len(seen), 'GPU')} by CUDA's word; links and atomics are unknown: {topology.missing}",
            "pip install nvidia-ml-py; in a container NVIDIA_DRIVER_CAPABILITIES must have `utility`",
        )
    elif not topology.devices:
        on_bus = _on_bus(system)
        there = f"; {count(on_bus, 'NVIDIA GPU')} on the PCI bus, out of reach from here" if on_bus else ""
        yield Finding(
            NOTE,
            "GPUs",
            f"none{there}: {topology.missing or 'the driver shows no GPU'}. The CPU backend works without",
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
        yield Finding(PROBLEM, "GPUs", f"{each}: it does not answer", "see dmesg for Xid; reset or reboot")


def _on_bus(system: System) -> int:
    """NVIDIA's display controllers on the PCI bus: without a driver too, and without NVSwitches."""
    folder = "/sys/bus/pci/devices"
    return sum(
        (system.read(f"{folder}/{name}/vendor") or "").strip() == "0x10de"
        and (system.read(f"{folder}/{name}/class") or "").startswith("0x03")
        for name in system.names(folder)
    )


def check_links(topology: Topology) -> Iterator[Finding]:
    whole = [device for device in topology.devices if device.parent is None]
    best = max((device.nvlinks for device in whole), default=0)
    for device in whole:
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
                "see whether its card sits right, and in a slot with all lanes",
            )


def check_peers(topology: Topology) -> Iterator[Finding]:
    part = topology.visible()
    if len(part.devices) < 2:
        # The job that this process belongs to may have the others.
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
        text = f"the driver does not say of {unknown} of {count(len(part.pairs), 'pair')} what they can do"
        yield Finding(NOTE, "peers", text, "python -m bench.gpu_suite tries them")
    else:
        speeds = sorted({round(pair.gbs) for pair in part.pairs if pair.gbs is not None})
        gbs = f", {speeds[0]}{f' to {speeds[-1]}' if len(speeds) > 1 else ''} GB/s per direction" if speeds else ""
        yield Finding(OK, "peers", f"all {len(part.pairs)} pairs: access and native atomics{gbs}")
