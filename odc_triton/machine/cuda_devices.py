"""What CUDA, by way of torch, says of the GPUs that this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A GPU as this process's CUDA numbers it. `peers`: the indices whose memory it can map, None if not asked."""

    index: int
    uuid: str
    name: str = ""
    bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    peers: tuple[int, ...] | None = None


def cuda_devices() -> tuple[CudaDevice, ...]:
    """The GPUs that CUDA shows this process, after CUDA_VISIBLE_DEVICES; none without torch or CUDA."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: one of its libraries does not load
        return ()
    if not torch.cuda.is_available():
        return ()
    indices = range(torch.cuda.device_count())
    found = []
    for index in indices:
        properties = torch.cuda.get_device_properties(index)
        place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        found.append(
            CudaDevice(
                index=index,
                uuid=str(properties.uuid),
                name=properties.name,
                bus_id=None if None in place else "{:08x}:{:02x}:{:02x}.0".format(*place),
                compute_capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
                peers=tuple(j for j in indices if j != index and torch.cuda.can_device_access_peer(index, j)),
            )
        )
    return tuple(found)


def visible_names(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, None where it is not set."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [entry.strip() for entry in text.split(",") if entry.strip()]
