"""The questions we ask the NVIDIA driver, its answers, and files of these, which replace a machine. Pure.

Answers are NVML's own numbers; probe.py interprets them. None: this driver or GPU does not answer.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

# For nvmlDeviceGetP2PStatus. Literals, because a stray comma makes pynvml's NVML_P2P_CAPS_INDEX_READ the tuple (0,).
_READ, _WRITE, _NVLINK, _ATOMICS = 0, 1, 2, 3

_WHY_NOT = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found)",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is installed, but its kernel module is not loaded",
    "NVMLError_LibRmVersionMismatch": "the NVIDIA driver's library and its kernel module differ in version "
    "(the driver was upgraded: reboot, or reload the module)",
    "NVMLError_NoPermission": "no permission to ask the NVIDIA driver (are /dev/nvidia* in this container?)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAnswers:
    """One NVLink of a GPU. `remote_type`: 0 GPU, 1 CPU, 2 switch, 255 unknown; `speed_mbps`: 10⁶ bytes per second."""

    active: int | None = None
    remote_type: int | None = None
    remote_bus_id: str | None = None
    speed_mbps: int | None = None
    atomics: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAnswers:
    """One GPU. `error`: why it can't be used; nothing else is known then."""

    index: int
    uuid: str = ""
    error: str | None = None
    name: str | None = None
    bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: tuple[LinkAnswers, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAnswers:
    """nvmlGpuP2PStatus_t for four capabilities, and nvmlGpuTopologyLevel_t of the common PCIe ancestor."""

    read: int | None = None
    write: int | None = None
    atomics: int | None = None
    nvlink: int | None = None
    ancestor: int | None = None


class Nvml(Protocol):
    """`missing`: why the driver can't be asked; then there are no devices and every answer is None."""

    missing: str | None

    def driver_version(self) -> str | None: ...

    def cuda_version(self) -> str | None:
        """The newest CUDA that the driver supports, as `12.4`."""

    def devices(self) -> list[DeviceAnswers]: ...

    def pair(self, one: str, other: str) -> PairAnswers:
        """The answers for the GPUs with these UUIDs."""


class DriverNvml:
    """Asks the driver. Any question may go unanswered; that never raises."""

    def __init__(self, library: ModuleType | None = None) -> None:
        self.missing: str | None = None
        self._handles: dict[str, Any] = {}
        try:
            self._library = library or importlib.import_module("pynvml")
        except ImportError:
            self.missing = "the Python package nvidia-ml-py is not installed"
            return
        try:
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            self.missing = _WHY_NOT.get(type(error).__name__, f"NVML does not start: {error}")

    def close(self) -> None:
        if self.missing is None:
            self._ask("nvmlShutdown")
            self.missing = "NVML was closed"

    def _ask(self, question: str, *arguments: Any) -> Any:
        if self.missing is not None or not hasattr(self._library, question):
            return None
        try:
            answer = getattr(self._library, question)(*arguments)
        except self._library.NVMLError:
            return None
        return answer.decode() if isinstance(answer, bytes) else answer

    def driver_version(self) -> str | None:
        return self._ask("nvmlSystemGetDriverVersion")

    def cuda_version(self) -> str | None:
        number = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def devices(self) -> list[DeviceAnswers]:
        found: list[DeviceAnswers] = []
        for index in range(self._ask("nvmlDeviceGetCount") or 0):
            try:
                handle = self._library.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._library.nvmlDeviceGetUUID(handle))
            except self._library.NVMLError as error:
                found.append(DeviceAnswers(index=index, error=str(error)))
                continue
            self._handles[uuid] = handle
            if (self._ask("nvmlDeviceGetMigMode", handle) or [0])[0] == 1:
                found.append(DeviceAnswers(index=index, error="in MIG mode (`nvidia-smi -mig 0` ends it)"))
            else:
                found.append(self._device(index, uuid, handle))
        return found

    def _device(self, index: int, uuid: str, handle: Any) -> DeviceAnswers:
        pci = self._ask("nvmlDeviceGetPciInfo_v3", handle) or self._ask("nvmlDeviceGetPciInfo", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        return DeviceAnswers(
            index=index,
            uuid=uuid,
            name=self._ask("nvmlDeviceGetName", handle),
            bus_id=None if pci is None else _text(pci.busId),
            compute_capability=None if capability is None else tuple(capability),
            memory_bytes=None if memory is None else memory.total,
            pcie_generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_generation_max=self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            pcie_width_max=self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            links=self._links(handle),
        )

    def _links(self, handle: Any) -> tuple[LinkAnswers, ...]:
        found = []
        for link in range(getattr(self._library, "NVML_NVLINK_MAX_LINKS", 18)):
            active = self._ask("nvmlDeviceGetNvLinkState", handle, link)
            if not active:
                found += [] if active is None else [LinkAnswers(active=0)]
                continue
            remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            found.append(
                LinkAnswers(
                    active=active,
                    remote_type=self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link),
                    remote_bus_id=None if remote is None else _text(remote.busId),
                    speed_mbps=self._speed_mbps(handle, link),
                    atomics=self._ask(
                        "nvmlDeviceGetNvLinkCapability", handle, link, self._library.NVML_NVLINK_CAP_P2P_ATOMICS
                    ),
                )
            )
        return tuple(found)

    def _speed_mbps(self, handle: Any, link: int) -> int | None:
        """The first that has a value: this link's speed, the same from older drivers, or the speed of all links."""
        names = {"GET_SPEED": link, f"SPEED_MBPS_L{link}": 0, "SPEED_MBPS_COMMON": 0}
        numbers = {getattr(self._library, f"NVML_FI_DEV_NVLINK_{name}", None): scope for name, scope in names.items()}
        asked = [pair for pair in numbers.items() if pair[0] is not None]
        values = self._ask("nvmlDeviceGetFieldValues", handle, asked) or ()
        good = [int(value.value.uiVal) for value in values if value.nvmlReturn == 0 and value.value.uiVal]
        return good[0] if good else None

    def pair(self, one: str, other: str) -> PairAnswers:
        if one not in self._handles or other not in self._handles:
            return PairAnswers()
        handles = self._handles[one], self._handles[other]
        return PairAnswers(
            read=self._ask("nvmlDeviceGetP2PStatus", *handles, _READ),
            write=self._ask("nvmlDeviceGetP2PStatus", *handles, _WRITE),
            atomics=self._ask("nvmlDeviceGetP2PStatus", *handles, _ATOMICS),
            nvlink=self._ask("nvmlDeviceGetP2PStatus", *handles, _NVLINK),
            ancestor=self._ask("nvmlDeviceGetTopologyCommonAncestor", *handles),
        )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class SnapshotNvml:
    """Answers from a file's content.

    Consecutive links that are alike are one entry with a `count`; pairs that are alike are one entry whose `of` lists
    them, as positions in `devices`. Raises TypeError for an unknown answer.
    """

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self.missing: str | None = snapshot.get("missing")
        self._snapshot = snapshot
        self._devices = [_device_of(entry) for entry in snapshot.get("devices", ())]
        self._pairs: dict[frozenset[str], PairAnswers] = {}
        for entry in snapshot.get("pairs", ()):
            answers = PairAnswers(**{name: value for name, value in entry.items() if name != "of"})
            for one, other in entry["of"]:
                self._pairs[frozenset((self._devices[one].uuid, self._devices[other].uuid))] = answers

    def driver_version(self) -> str | None:
        return self._snapshot.get("driver_version")

    def cuda_version(self) -> str | None:
        return self._snapshot.get("cuda_version")

    def devices(self) -> list[DeviceAnswers]:
        return list(self._devices)

    def pair(self, one: str, other: str) -> PairAnswers:
        return self._pairs.get(frozenset((one, other)), PairAnswers())


_NOT_READ = {"parent", "mig", "numa_nodes", "cpus", "fabric_state"}  # that files may have


def _device_of(entry: Mapping[str, Any]) -> DeviceAnswers:
    entry = {name: answer for name, answer in entry.items() if name not in _NOT_READ}
    links: list[LinkAnswers] = []
    for link in entry.get("links", ()):
        answers = {name: value for name, value in link.items() if name != "count"}
        links += [LinkAnswers(**answers)] * link.get("count", 1)
    capability = entry.get("compute_capability")
    changed = {"links": tuple(links), "compute_capability": None if capability is None else tuple(capability)}
    return DeviceAnswers(**{**entry, **changed})
