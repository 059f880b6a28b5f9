"""GPUs as their data sheets have them: what a simulation needs of one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """Dense bf16 (V100: fp16) TFLOP/s, GB of memory, GB/s of memory, GB/s to each other per direction.

    `nic_gbs`: GB/s per GPU between nodes, of the usual cluster of its time (one 200 or 400 Gb/s port per GPU).
    """

    tflops: float
    memory_gb: float
    memory_gbs: float
    link_gbs: float
    nic_gbs: float


DEVICES = {
    "v100": GpuKind(tflops=125, memory_gb=32, memory_gbs=900, link_gbs=150, nic_gbs=12.5),
    "a100": GpuKind(tflops=312, memory_gb=80, memory_gbs=2039, link_gbs=300, nic_gbs=25),
    "a6000": GpuKind(tflops=155, memory_gb=48, memory_gbs=768, link_gbs=31.5, nic_gbs=12.5),
    "l40s": GpuKind(tflops=362, memory_gb=48, memory_gbs=864, link_gbs=31.5, nic_gbs=25),
    "h100": GpuKind(tflops=989, memory_gb=80, memory_gbs=3350, link_gbs=450, nic_gbs=50),
    "h200": GpuKind(tflops=989, memory_gb=141, memory_gbs=4800, link_gbs=450, nic_gbs=50),
    "b200": GpuKind(tflops=2250, memory_gb=180, memory_gbs=7700, link_gbs=900, nic_gbs=50),
}


def find_device(name: str) -> GpuKind:
    """By a word of the name, as `NVIDIA H100 80GB HBM3` has `h100`. Raises ValueError naming those that are known."""
    found = [kind for word, kind in DEVICES.items() if word in name.lower()]
    if len(found) != 1:
        raise ValueError(f"the GPU {name!r} is not known: give --gpu one of {', '.join(DEVICES)}")
    return found[0]
