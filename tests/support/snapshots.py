"""Machines as NVML described them, in tests/snapshots, and the names of their GPUs' topologies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from odc_triton.machine.probe import VisibleDevice, read_topology
from odc_triton.machine.topology import Topology

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"
KEYS = {"a6000-bridges": "pcie-gen4x16+nvlink-4x14", "hgx-h100-nvswitch": "nvswitch-18x25", "pcie-only": "pcie-gen4x16"}


NAMES = sorted(path.stem for path in SNAPSHOTS.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    return json.loads((SNAPSHOTS / f"{name}.json").read_text())


def seen(snapshot: dict[str, Any], *places: int) -> list[VisibleDevice]:
    """The GPUs at these places as CUDA shows them, in this order; by default all."""
    devices = snapshot["devices"]
    chosen = [devices[place] for place in places] if places else devices
    return [VisibleDevice(index=index, uuid=device["uuid"][4:]) for index, device in enumerate(chosen)]


def topology(name: str, *places: int) -> Topology:
    return read_topology(load(name), seen(load(name), *places))
