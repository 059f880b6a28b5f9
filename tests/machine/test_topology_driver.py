"""What is asked of NVML by way of pynvml."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from odc_triton.machine.nvml import DriverNvml, LinkAnswers, PairAnswers, SnapshotNvml
from odc_triton.machine.probe import read_topology
from odc_triton.machine.topology import P2P, Topology
from odc_triton.machine.unusable import unusable_pairs
from tests.support.snapshots import NAMES, load, seen, topology


class FakeLibrary:
    """libnvidia-ml.so as ctypes sees it, answering from a snapshot: what pynvml calls runs for real."""

    def __init__(self, snapshot: dict[str, Any], refused: set[str] = frozenset(), field_of_all_links: int = 0) -> None:
        self.nvml, self.refused, self.field_of_all_links = SnapshotNvml(snapshot), refused, field_of_all_links
        self.gpus = self.nvml.devices()
        self.in_mig_mode = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        if f"_{name}" not in type(self).__dict__:
            raise AttributeError(name)
        return lambda *arguments: 3 if name in self.refused else getattr(self, f"_{name}")(*arguments)

    def _give(self, out: Any, value: Any) -> int:
        if value is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        out._obj.value = value
        return 0

    def _text(self, buffer: Any, text: str | None) -> int:
        if text is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        buffer.value = text.encode()
        return 0

    def _of(self, handle: Any) -> Any:
        return self.gpus[handle.place]

    def _nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def _nvmlShutdown(self) -> int:
        return 0

    def _nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        return self._text(buffer, self.nvml.driver_version())

    def _nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> int:
        major, minor = self.nvml.cuda_version().split(".")
        return self._give(out, 1000 * int(major) + 10 * int(minor))

    def _nvmlDeviceGetCount_v2(self, out: Any) -> int:
        return self._give(out, len(self.gpus))

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        if self.gpus[index.value].error is not None:
            return pynvml.NVML_ERROR_GPU_IS_LOST
        out._obj.place = index.value
        return 0

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        return self._text(buffer, self._of(handle).uuid)

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return self._give(current, int(self.in_mig_mode))

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        return self._text(buffer, self._of(handle).name)

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> int:
        out._obj.busId = self._of(handle).bus_id.encode()
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.total = self._of(handle).memory_bytes
        return 0

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._of(handle).compute_capability
        return 0

    def _nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any, out: Any) -> int:
        return self._give(out, self._of(handle).pcie_generation)

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, out: Any) -> int:
        return self._give(out, self._of(handle).pcie_generation_max)

    def _nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, out: Any) -> int:
        return self._give(out, self._of(handle).pcie_width)

    def _nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, out: Any) -> int:
        return self._give(out, self._of(handle).pcie_width_max)

    def _link(self, handle: Any, link: int) -> LinkAnswers | None:
        links = self._of(handle).links
        return links[link] if link < len(links) else None

    def _nvmlDeviceGetNvLinkState(self, handle: Any, link: int, out: Any) -> int:
        found = self._link(handle, link)
        return pynvml.NVML_ERROR_INVALID_ARGUMENT if found is None else self._give(out, found.active)

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int, out: Any) -> int:
        return self._give(out, self._link(handle, link).remote_type)

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, out: Any) -> int:
        out._obj.busId = self._link(handle, link).remote_bus_id.encode()
        return 0

    def _nvmlDeviceGetNvLinkCapability(self, handle: Any, link: int, capability: int, out: Any) -> int:
        assert capability == pynvml.NVML_NVLINK_CAP_P2P_ATOMICS
        return self._give(out, self._link(handle, link).atomics)

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, out: Any) -> int:
        for value in list(out._obj)[: count.value]:
            own = value.fieldId == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED and not self.field_of_all_links
            common = value.fieldId == pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
            value.nvmlReturn = 0 if own or common else 3
            value.value.uiVal = self._link(handle, value.scopeId).speed_mbps if own else self.field_of_all_links
        return 0

    def _nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: int, out: Any) -> int:
        ctypes.c_uint(index)  # raises for the tuple that pynvml.NVML_P2P_CAPS_INDEX_READ is
        answers = self.nvml.pair(self._of(one).uuid, self._of(other).uuid)
        return self._give(out, (answers.read, answers.write, answers.nvlink, answers.atomics)[index])

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, out: Any) -> int:
        return self._give(out, self.nvml.pair(self._of(one).uuid, self._of(other).uuid).ancestor)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DriverNvml]:
    def make(snapshot: dict[str, Any], **options: Any) -> DriverNvml:
        monkeypatch.setattr(pynvml, "nvmlLib", FakeLibrary(snapshot, **options))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return DriverNvml()

    return make


@pytest.mark.parametrize("name", NAMES)
def test_the_driver_and_the_file_say_the_same(name: str, driver: Callable[..., Any]) -> None:
    through_pynvml = read_topology(driver(load(name)), seen(load(name)))
    assert through_pynvml == topology(name)
    assert through_pynvml.driver_version == load(name)["driver_version"]


def test_a_gpu_in_mig_mode_is_left_out(driver: Callable[..., Any]) -> None:
    nvml = driver(load("one-of-a-container"))
    pynvml.nvmlLib.in_mig_mode = True
    found = read_topology(nvml, ())
    assert (found.devices, found.lost) == ((), ("GPU0: in MIG mode (`nvidia-smi -mig 0` ends it)",))


QUESTIONS = sorted(
    name[1:] for name in vars(FakeLibrary) if name.startswith("_nvml") and "Init" not in name and "Handle" not in name
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_any_question_may_stay_without_an_answer(question: str, driver: Callable[..., Any]) -> None:
    name = "hgx-h100-nvswitch"
    found = read_topology(driver(load(name), refused={question}), ())
    left = {"nvmlDeviceGetCount_v2": 0, "nvmlDeviceGetUUID": 0}
    assert len(found.devices) == left.get(question, len(load(name)["devices"]))
    assert isinstance(found.key, str)
    if question == "nvmlDeviceGetP2PStatus":
        assert {pair.read for pair in found.pairs} == {P2P.UNKNOWN}
        assert not unusable_pairs(found)


def test_the_speed_comes_from_the_field_of_all_links_or_from_the_table(driver: Callable[..., Any]) -> None:
    name = "hgx-h100-nvswitch"
    for options, gbs, said in (
        ({"field_of_all_links": 25781}, 25.781, "driver"),
        ({"refused": {"nvmlDeviceGetFieldValues"}}, 26.562, "table"),
        ({"field_of_all_links": 4_000_000_000}, 26.562, "table"),  # not sane
    ):
        found = read_topology(driver(load(name), **options), ())
        assert {(pair.link_gbs, pair.link_gbs_from) for pair in found.pairs} == {(gbs, said)}
        assert found.key == "nvswitch-18x25"


def test_a_lost_gpu_does_not_hide_the_others(driver: Callable[..., Any]) -> None:
    snapshot = load("one-of-a-container")
    snapshot["devices"].append({"index": 1, "error": "GPU is lost"})
    found = read_topology(driver(snapshot), ())
    assert found.lost == ("GPU1: GPU is lost",)
    assert [device.label for device in found.devices] == ["GPU0"]


def test_no_library_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(code: int) -> str | None:
        library = type("Library", (), {"nvmlInitWithFlags": staticmethod(lambda flags: code)})()
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return DriverNvml().missing

    assert "kernel module is not loaded" in broken(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert "differ in version" in broken(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert "Unknown Error" in broken(pynvml.NVML_ERROR_UNKNOWN)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = DriverNvml()
    assert "nvidia-ml-py is not installed" in nvml.missing
    assert (nvml.devices(), nvml.driver_version(), nvml.pair("a", "b")) == ([], None, PairAnswers())
    assert read_topology(nvml, ()) == Topology(missing=nvml.missing)


def test_a_snapshot_with_unknown_words_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        SnapshotNvml({"devices": [{"index": 0, "uuid": "a", "colour": "green"}]})
    with pytest.raises(TypeError, match="colour"):
        SnapshotNvml({"devices": [{"index": 0, "uuid": "a"}], "pairs": [{"of": [], "colour": 1}]})
