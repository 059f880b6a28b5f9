"""Checks that this machine's GPUs can hold shards of one model."""

from __future__ import annotations

from collections.abc import Iterator

from ...machine.topology import Topology
from ...machine.unusable import unusable_pairs
from .findings import NOTE, OK, PROBLEM, Finding, count, dotted

_OLDEST_GPU = (8, 0)


def check_gpus(topology: Topology) -> Iterator[Finding]:
    seen = topology.visible().devices
    if topology.missing is not None and seen:
        text = f"CUDA reports {count(len(seen), 'GPU')}; links and atomics are unknown: {topology.missing}"
        remedy = "pip install nvidia-ml-py; in a container NVIDIA_DRIVER_CAPABILITIES must have `utility`"
        yield Finding(NOTE, "GPUs", text, remedy)
    elif not topology.devices:
        text = f"none: {topology.missing or 'the driver shows no GPU'}. Ranks train on the CPU"
        remedy = "if this machine has GPUs: install the driver, or start the container with them (`--gpus all`)"
        yield Finding(NOTE, "GPUs", text, remedy)
    else:
        masked = len(topology.devices) - len(seen)
        some = f", {len(seen)} of {len(topology.devices)} visible to this process" if masked else ""
        names = sorted({device.name for device in topology.devices})
        text = f"{count(len(topology.devices), 'GPU')} ({', '.join(names)}){some}; topology {topology.key}"
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


def check_peers(topology: Topology) -> Iterator[Finding]:
    part = topology.visible()
    if len(part.devices) < 2:
        # This process's job may use the other GPUs.
        if bad := sum(map(len, unusable_pairs(topology).values())):
            text = f"{bad} of {len(topology.pairs)} pairs of this machine's GPUs can't share a model's shards"
            yield Finding(NOTE, "peers", text, "`nvidia-smi topo -p2p rwa` shows which")
    elif bad := unusable_pairs(part):
        for (reason, remedy), pairs in bad.items():
            names = ", ".join(f"{pair.one.label}-{pair.other.label}" for pair in pairs[:4])
            more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
            text = f"{len(pairs)} of {count(len(part.pairs), 'pair')}: {reason} ({names}{more})"
            yield Finding(PROBLEM, "peers", text, remedy)
    elif unknown := sum(pair.is_partly_unknown for pair in part.pairs):
        text = f"the driver does not report access or atomics of {unknown} of {count(len(part.pairs), 'pair')}"
        yield Finding(NOTE, "peers", text, "python -m odc_bench.suites.links tries them")
    else:
        speeds = sorted({round(pair.gbs) for pair in part.pairs if pair.gbs is not None})
        gbs = f", {speeds[0]}{f' to {speeds[-1]}' if len(speeds) > 1 else ''} GB/s per direction" if speeds else ""
        yield Finding(OK, "peers", f"all {len(part.pairs)} pairs: access and native atomics{gbs}")
