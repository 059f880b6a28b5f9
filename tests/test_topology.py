"""What is asked of NVML, what its answers mean, and which pairs of GPUs are refused; on snapshots of machines."""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from odc_triton.nvml import CudaDevice, DriverNvml, LinkAnswers, PairAnswers, Recorder, SnapshotNvml, visible_names
from odc_triton.topology import P2P, PciePath, Topology, read_topology, refuse_unusable, unusable_pairs, usable_groups

SNAPSHOTS = Path(__file__).parent / "snapshots"
KEYS = {
    "a100-nvlink-mesh": "nvlink-4x25",
    "a6000-bridges": "pcie-gen4x16+nvlink-4x14",
    "hgx-h100-nvswitch": "nvswitch-18x25",
    "mig": "mig",
    "one-of-a-container": "one-gpu",
    "pcie-only": "pcie-gen4x16",
    "v100-cube-mesh": "pcie-gen3x16+nvlink-2x25",
}
NAMES = sorted(path.stem for path in SNAPSHOTS.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    return json.loads((SNAPSHOTS / f"{name}.json").read_text())


def seen(snapshot: dict[str, Any], *places: int) -> list[CudaDevice]:
    """The GPUs at these places as CUDA shows them, in this order; all if none are named."""
    devices = SnapshotNvml(snapshot).devices()
    chosen = [devices[place] for place in places] if places else devices
    return [CudaDevice(index=index, uuid=device.uuid[4:]) for index, device in enumerate(chosen)]


def topology(name: str, *places: int) -> Topology:
    return read_topology(SnapshotNvml(load(name)), seen(load(name), *places))


class FakeLibrary:
    """libnvidia-ml.so as ctypes sees it, answering from a snapshot: what pynvml calls runs for real."""

    def __init__(self, snapshot: dict[str, Any], refused: set[str] = frozenset(), field_of_all_links: int = 0) -> None:
        self.nvml, self.refused, self.field_of_all_links = SnapshotNvml(snapshot), refused, field_of_all_links
        self.gpus: list[list[Any]] = []  # of each GPU the devices on it: itself, or its slices
        for device in self.nvml.devices():
            if device.index == len(self.gpus):
                self.gpus.append([])
            self.gpus[-1].append(device)

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
        gpu, number = handle.place
        return self.gpus[gpu][number or 0]

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
        if self.gpus[index.value][0].error is not None:
            return pynvml.NVML_ERROR_GPU_IS_LOST
        out._obj.place = (index.value, None)
        return 0

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        device = self._of(handle)
        return self._text(buffer, device.parent if device.parent and handle.place[1] is None else device.uuid)

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return self._give(current, int(self._of(handle).parent is not None))

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        return self._give(out, 7)

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> int:
        if index.value >= len(self.gpus[handle.place[0]]):
            return pynvml.NVML_ERROR_NOT_FOUND
        out._obj.place = (handle.place[0], index.value)
        return 0

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

    def _bits(self, out: Any, text: str | None) -> int:
        for run in (text or "").split(","):
            first, _, last = run.partition("-")
            for bit in range(int(first), int(last or first) + 1):
                out._obj[bit // 64] |= 1 << bit % 64
        return 0

    def _nvmlDeviceGetCpuAffinity(self, handle: Any, words: int, out: Any) -> int:
        return self._bits(out, self._of(handle).cpus)

    def _nvmlDeviceGetMemoryAffinity(self, handle: Any, words: int, out: Any, scope: Any) -> int:
        return self._bits(out, self._of(handle).numa_nodes)

    def _nvmlDeviceGetGpuFabricInfoV(self, handle: Any, out: Any) -> int:
        state = self._of(handle).fabric_state
        out._obj.state = state or 0
        return 3 if state is None else 0

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
def test_the_driver_a_recording_of_it_and_the_snapshot_say_the_same(name: str, driver: Callable[..., Any]) -> None:
    recorder = Recorder(driver(load(name)))
    through_pynvml = read_topology(recorder, seen(load(name)))
    assert through_pynvml == topology(name)
    again = json.loads(json.dumps(recorder.snapshot()))
    assert read_topology(SnapshotNvml(again), seen(load(name))) == topology(name)
    assert through_pynvml.driver_version == load(name)["driver_version"]
    assert through_pynvml.devices[-1].cpus == load(name)["devices"][-1]["cpus"]


QUESTIONS = sorted(
    name[1:] for name in vars(FakeLibrary) if name.startswith("_nvml") and "Init" not in name and "Handle" not in name
)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", ["hgx-h100-nvswitch", "mig"])
def test_any_question_may_stay_without_an_answer(name: str, question: str, driver: Callable[..., Any]) -> None:
    found = read_topology(driver(load(name), refused={question}), ())
    whole = len(load(name)["devices"])
    left = {"nvmlDeviceGetCount_v2": 0, "nvmlDeviceGetUUID": 0}
    if name == "mig":  # without slices a GPU is taken for whole, or has none
        left |= {"nvmlDeviceGetMigMode": 2, "nvmlDeviceGetMaxMigDeviceCount": 0}
    assert len(found.devices) == left.get(question, whole)
    assert isinstance(found.key, str)
    if question == "nvmlDeviceGetP2PStatus" and name != "mig":
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


def test_without_nvml_cuda_stands_in() -> None:
    cuda = [
        CudaDevice(index=0, uuid="a", peers=(1,)),
        CudaDevice(index=1, uuid="b", peers=(0,)),
        CudaDevice(index=2, uuid="c", peers=()),
    ]
    found = read_topology(SnapshotNvml({"missing": "no NVML"}), cuda)
    assert [pair.read.name for pair in found.pairs] == ["OK", "NOT_SUPPORTED", "NOT_SUPPORTED"]
    assert {pair.atomics for pair in found.pairs} == {P2P.UNKNOWN}
    assert (found.key, found.missing) == ("unknown", "no NVML")
    refuse_unusable(found, ["a", "b"])
    with pytest.raises(RuntimeError, match=r"rank 0 on GPU0 .* and rank 1 on GPU2 .* can't read each other's memory"):
        refuse_unusable(found, ["a", "c"])


def test_every_snapshot_has_its_key() -> None:
    assert {name: topology(name).key for name in NAMES} == KEYS
    assert Topology().key == "cpu"


@pytest.mark.parametrize("name", NAMES)
def test_the_key_does_not_depend_on_the_order_of_gpus(name: str) -> None:
    found = topology(name)
    shuffled = random.Random(0).sample(found.pairs, len(found.pairs))
    assert replace(found, devices=found.devices[::-1], pairs=tuple(shuffled)).key == KEYS[name]


def test_a_part_has_the_key_of_what_joins_it() -> None:
    cubes = topology("v100-cube-mesh")
    uuids = [device.uuid for device in cubes.devices]
    assert cubes.only(uuids[:4]).key == "nvlink-1x25+nvlink-2x25"
    assert cubes.only([uuids[0], uuids[3]]).key == "nvlink-2x25"
    assert cubes.only(uuids[:1]).key == "one-gpu"
    assert cubes.only([None, "GPU-of-elsewhere"]).key == "cpu"
    assert topology("hgx-h100-nvswitch").only(u[4:].upper() for u in [load("hgx-h100-nvswitch")["devices"][0]["uuid"]])


def test_what_joins_pairs() -> None:
    for name, nvlinks, switch, gbs, path in (
        ("hgx-h100-nvswitch", 18, True, 18 * 26.562, PciePath.NODE),
        ("a100-nvlink-mesh", 4, False, 100.0, PciePath.NODE),
        ("a6000-bridges", 4, False, 4 * 14.062, PciePath.NODE),
        ("pcie-only", 0, False, 16 * 1.969, PciePath.NODE),
        ("v100-cube-mesh", 1, False, 25.781, PciePath.PIX),
    ):
        pair = topology(name).pairs[0]
        assert (pair.nvlinks, pair.through_switch, pair.path) == (nvlinks, switch, path), name
        assert pair.gbs == pytest.approx(gbs), name
    assert topology("v100-cube-mesh").pairs[0].link_gbs_from == "table"


def test_links_that_are_down_partitioned_or_hidden() -> None:
    snapshot = load("hgx-h100-nvswitch")
    snapshot["devices"][2]["links"][0]["active"] = 0
    found = read_topology(SnapshotNvml(snapshot), ())
    assert (found.devices[2].nvlinks, found.devices[2].nvlinks_present) == (14, 18)
    assert found.pair(found.devices[2], found.devices[5]).nvlinks == 14
    assert found.key == "nvswitch-14x25+nvswitch-18x25"

    for entry in snapshot["pairs"]:
        entry["nvlink"] = P2P.NOT_SUPPORTED  # in another partition of the fabric
    assert {pair.nvlinks for pair in read_topology(SnapshotNvml(snapshot), ()).pairs} == {0}

    snapshot = load("hgx-h100-nvswitch")
    for device in snapshot["devices"]:  # as in a virtual machine
        for link in device["links"]:
            link |= {"remote_type": 255, "remote_bus_id": "FFFFFFFF:FF:00.0"}
    assert read_topology(SnapshotNvml(snapshot), ()).key == "nvswitch-18x25"


def test_atomics_by_the_links_where_the_driver_does_not_say_of_the_pair() -> None:
    snapshot = load("a100-nvlink-mesh")
    del snapshot["pairs"][0]["atomics"]
    assert {pair.atomics for pair in read_topology(SnapshotNvml(snapshot), ()).pairs} == {P2P.OK}
    snapshot["devices"][0]["links"][0]["atomics"] = 0
    pairs = read_topology(SnapshotNvml(snapshot), ()).pairs
    assert [pair.atomics.name for pair in pairs[:2]] == ["UNKNOWN", "OK"]


@pytest.mark.parametrize("places", [(5,), (7, 0, 3)])
def test_a_mask_is_undone_by_uuid(places: tuple[int, ...]) -> None:
    found = topology("hgx-h100-nvswitch", *places)
    assert {device.cuda_index: device.index for device in found.devices if device.cuda_index is not None} == dict(
        enumerate(places)
    )
    assert len(found.devices) == 8
    assert found.visible().key == ("one-gpu" if len(places) == 1 else "nvswitch-18x25")


def test_a_mask_is_undone_by_bus_id() -> None:
    cuda = [CudaDevice(index=0, uuid="not known to NVML", bus_id="0000:bb:00.0")]
    found = read_topology(SnapshotNvml(load("hgx-h100-nvswitch")), cuda)
    assert [device.index for device in found.visible().devices] == [5]


def test_mig_slices_by_their_uuid_or_by_the_mask() -> None:
    snapshot = load("mig")
    parent, uuids = snapshot["devices"][0]["parent"], [device["uuid"] for device in snapshot["devices"]]
    whole = [CudaDevice(index=0, uuid=parent[4:])]
    for cuda, names, labels in (
        ([CudaDevice(index=0, uuid=uuids[1][4:])], None, ["GPU0:1"]),
        (whole, [uuids[2]], ["GPU0:2"]),
        (whole, None, []),  # which of three, nobody can tell
        ([CudaDevice(index=0, uuid=snapshot["devices"][3]["parent"][4:])], None, ["GPU1:0"]),
    ):
        found = read_topology(SnapshotNvml(snapshot), cuda, names)
        assert [device.label for device in found.visible().devices] == labels
    assert visible_names({"CUDA_VISIBLE_DEVICES": f" {uuids[0]}, 1,"}) == [uuids[0], "1"]
    assert visible_names({}) is None


@pytest.mark.parametrize(
    ("name", "bad", "of", "groups"),
    [
        ("hgx-h100-nvswitch", 0, 28, [8]),
        ("a100-nvlink-mesh", 0, 6, [4]),
        ("a6000-bridges", 4, 6, [2, 2]),
        ("pcie-only", 6, 6, [1, 1, 1, 1]),
        ("v100-cube-mesh", 12, 28, [4, 4]),
        ("mig", 6, 6, [1, 1, 1, 1]),
        ("one-of-a-container", 0, 0, [1]),
    ],
)
def test_unusable_pairs_and_groups(name: str, bad: int, of: int, groups: list[int]) -> None:
    found = topology(name)
    assert (len(unusable_pairs(found)), len(found.pairs)) == (bad, of)
    assert [len(group) for group in usable_groups(found)] == groups
    for group in usable_groups(found):
        assert not unusable_pairs(found.only(device.uuid for device in group))


@pytest.mark.parametrize(
    ("statuses", "reason", "remedy"),
    [
        ((0, 0, 1), "no native atomics over PCIe .the chipset", "only NVLink has native atomics"),
        ((0, 5, 5), "can't write to each other's memory: the driver", "ask the host"),
        ((1, 1, 1), "can't read each other's memory: the chipset", "IOMMU .* ACS"),
        ((2, 2, 2), "this model of GPU", "use one GPU"),
        ((3, 3, 3), "different PCIe roots", "use one GPU"),
        ((4, 4, 4), "the driver's settings", "NVreg"),
    ],
)
def test_each_reason_has_its_remedy(statuses: tuple[int, int, int], reason: str, remedy: str) -> None:
    snapshot = load("pcie-only")
    snapshot["pairs"] = [{"of": [[0, 1]], **dict(zip(("read", "write", "atomics"), statuses, strict=True))}]
    found = read_topology(SnapshotNvml(snapshot), ())
    uuids = [device.uuid for device in found.devices[:2]]
    with pytest.raises(RuntimeError, match=f"(?s)rank 0 on GPU0 .*rank 1 on GPU1 .*{reason}.*(?i:{remedy})"):
        refuse_unusable(found, uuids)
    refuse_unusable(found, [found.devices[0].uuid, found.devices[2].uuid])  # of which nothing is known


def test_a_fabric_that_is_not_up() -> None:
    snapshot = load("hgx-h100-nvswitch")
    snapshot["devices"][1]["fabric_state"] = 2
    snapshot["pairs"] = [{"of": [[0, 1]], "read": 5, "write": 5, "atomics": 5}]
    found = read_topology(SnapshotNvml(snapshot), ())
    with pytest.raises(RuntimeError, match=r"fabric is starting for GPU1.*nvidia-fabricmanager"):
        refuse_unusable(found, [device.uuid for device in found.devices])


def test_which_ranks_are_refused() -> None:
    found = topology("a6000-bridges")
    uuids = [device.uuid[4:] for device in found.devices]  # as torch writes them
    for fine in (uuids[:2], [uuids[0]] * 3, [None, None], [uuids[0], "GPU-of-elsewhere"], []):
        refuse_unusable(found, fine)
    with pytest.raises(RuntimeError) as caught:
        refuse_unusable(found, [uuids[2], uuids[2], uuids[3], uuids[1]])
    text = str(caught.value)
    assert "rank 0 on GPU2 (NVIDIA RTX A6000, 00000000:CA:00.0) and rank 3 on GPU1" in text
    assert "CUDA_VISIBLE_DEVICES=2,3" in text
    assert "2 of 3 pairs" in text


def test_a_snapshot_with_unknown_words_is_refused() -> None:
    with pytest.raises(TypeError, match="nobody asks for"):
        SnapshotNvml({"devices": [{"index": 0, "uuid": "a", "colour": "green"}]})
    with pytest.raises(TypeError):
        SnapshotNvml({"devices": [{"index": 0, "uuid": "a"}], "pairs": [{"of": [], "colour": 1}]})


def test_every_snapshot_says_where_it_comes_from() -> None:
    assert set(NAMES) == set(KEYS)
    for name in NAMES:
        assert any("not recorded" in line for line in load(name)["about"]), name
