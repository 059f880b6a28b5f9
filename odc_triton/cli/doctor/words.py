"""Numbers and lines as tables and findings write them."""

from __future__ import annotations

import textwrap

from ...machine.topology import Topology

WIDTH = 100


def dotted(compute_capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, compute_capability or ("?",)))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count_devices(topology: Topology) -> str:
    return count(len(topology.devices), "MIG slice" if any(device.parent for device in topology.devices) else "GPU")


def size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
