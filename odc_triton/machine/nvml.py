"""The NVIDIA driver's answers about GPUs and their links.

Answers are NVML's own numbers, which probe.py interprets:

    missing                   why the driver can't be queried; then there is nothing else
    driver_version, cuda_version
    devices                   index, uuid, name, bus_id, compute_capability, memory_bytes, pcie_generation_max,
                              pcie_width_max, links; instead `error` for a GPU that can't be used
    links of a device         active, remote_type (0 GPU, 1 CPU, 2 switch, 255 unknown), remote_bus_id, speed_mbps
                              (10⁶ bytes per second), atomics; in a file `count` for as many alike
    pairs                     of (positions in devices, of all pairs that are alike), nvmlGpuP2PStatus_t for read,
                              write, atomics and nvlink

None or missing: this driver or GPU does not answer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import combinations
from types import ModuleType
from typing import Any

# For nvmlDeviceGetP2PStatus. Literals, because a stray comma makes pynvml's NVML_P2P_CAPS_INDEX_READ the tuple (0,).
_P2P = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}

_WHY_NOT = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found)",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is installed, but its kernel module is not loaded",
    "NVMLError_LibRmVersionMismatch": "the NVIDIA driver's library and its kernel module differ in version "
    "(the driver was upgraded: reboot, or reload the module)",
    "NVMLError_NoPermission": "no permission to ask the NVIDIA driver (are /dev/nvidia* in this container?)",
}

Ask = Callable[..., Any]


def ask_driver(library: ModuleType | None = None) -> dict[str, Any]:
    """Queries the driver. Queries that fail give None and never raise. `library`: pynvml."""
    try:
        library = library or importlib.import_module("pynvml")
    except ImportError:
        return {"missing": "the Python package nvidia-ml-py is not installed"}
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return {"missing": _WHY_NOT.get(type(error).__name__, f"NVML does not start: {error}")}

    def ask(question: str, *arguments: Any) -> Any:
        try:
            answer = getattr(library, question)(*arguments)
        except (library.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py
            return None
        return _text(answer)

    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")
    devices: list[dict[str, Any]] = []
    handles: dict[int, Any] = {}
    for index in range(ask("nvmlDeviceGetCount") or 0):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(library.nvmlDeviceGetUUID(handle))
        except library.NVMLError as error:
            devices.append({"index": index, "error": str(error)})
            continue
        if (ask("nvmlDeviceGetMigMode", handle) or [0])[0] == 1:
            devices.append({"index": index, "error": "in MIG mode (`nvidia-smi -mig 0` ends it)"})
            continue
        handles[index] = handle
        devices.append({"index": index, "uuid": uuid, **_device(ask, handle), "links": _links(ask, handle, library)})
    pairs = [{"of": [[a, b]], **_pair(ask, handles[a], handles[b])} for a, b in combinations(handles, 2)]
    answers = {
        "driver_version": ask("nvmlSystemGetDriverVersion"),
        "cuda_version": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "devices": devices,
        "pairs": pairs,
    }
    ask("nvmlShutdown")
    return answers


def _device(ask: Ask, handle: Any) -> dict[str, Any]:
    pci = ask("nvmlDeviceGetPciInfo_v3", handle) or ask("nvmlDeviceGetPciInfo", handle)
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    return {
        "name": ask("nvmlDeviceGetName", handle),
        "bus_id": None if pci is None else _text(pci.busId),
        "compute_capability": ask("nvmlDeviceGetCudaComputeCapability", handle),
        "memory_bytes": None if memory is None else memory.total,
        "pcie_generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
    }


def _links(ask: Ask, handle: Any, library: ModuleType) -> list[dict[str, Any]]:
    found = []
    for link in range(getattr(library, "NVML_NVLINK_MAX_LINKS", 18)):
        if not ask("nvmlDeviceGetNvLinkState", handle, link):
            continue
        remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        found.append(
            {
                "active": 1,
                "remote_type": ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link),
                "remote_bus_id": None if remote is None else _text(remote.busId),
                "speed_mbps": _speed_mbps(ask, handle, link, library),
                "atomics": ask("nvmlDeviceGetNvLinkCapability", handle, link, library.NVML_NVLINK_CAP_P2P_ATOMICS),
            }
        )
    return found


def _speed_mbps(ask: Ask, handle: Any, link: int, library: ModuleType) -> int | None:
    """This link's speed, or the same query for older drivers, or the common speed of all links."""
    names = {"GET_SPEED": link, f"SPEED_MBPS_L{link}": 0, "SPEED_MBPS_COMMON": 0}
    numbers = {getattr(library, f"NVML_FI_DEV_NVLINK_{name}", None): scope for name, scope in names.items()}
    values = ask("nvmlDeviceGetFieldValues", handle, [pair for pair in numbers.items() if pair[0] is not None]) or ()
    return next((int(v.value.uiVal) for v in values if v.nvmlReturn == 0 and v.value.uiVal), None)


def _pair(ask: Ask, one: Any, other: Any) -> dict[str, Any]:
    return {name: ask("nvmlDeviceGetP2PStatus", one, other, number) for name, number in _P2P.items()}


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
