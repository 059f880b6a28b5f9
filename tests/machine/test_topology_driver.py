"""What is asked of the driver through pynvml, and what becomes of answers that do not come."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Answer
from typing import Any

import pynvml
import pytest

from odc_triton.machine.nvml import ask_driver
from odc_triton.machine.probe import VisibleDevice, read_topology
from odc_triton.machine.topology import P2P, Topology
from odc_triton.machine.unusable import unusable_pairs
from tests.support.snapshots import NAMES, load, seen, topology

LINK = "nvmlDeviceGetNvLink"


class Library:
    """pynvml on the machine of a snapshot, whose handles are positions. `refused`: a question without an answer.

    `speeds`: of which field of NVLinks, by its name; by default the snapshot's, of each link.
    """

    def __init__(self, snapshot: dict[str, Any], refused: str = "", speeds: dict[str, int] | None = None) -> None:
        self.refused, self.speeds, self.is_mig = refused, speeds, False
        self.snapshot, self.devices = snapshot, snapshot["devices"]
        self.pairs = {frozenset(of): entry for entry in snapshot["pairs"] for of in entry["of"]}
        self.links = [[one for one in d.get("links", ()) for _ in range(one.get("count", 1))] for d in self.devices]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)

        def ask(*arguments: Any) -> Any:
            answer = None if name == self.refused else self._answer(name, *arguments)
            if answer is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer

        return ask

    def _answer(self, name: str, *arguments: Any) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            return 0
        if name == "nvmlDeviceGetCount":
            return len(self.devices)
        if name == "nvmlSystemGetDriverVersion":
            return self.snapshot["driver_version"].encode()  # older ones answer in bytes
        if name == "nvmlSystemGetCudaDriverVersion_v2":
            major, minor = map(int, self.snapshot["cuda_version"].split("."))
            return 1000 * major + 10 * minor
        if name == "nvmlDeviceGetHandleByIndex":
            if "error" in self.devices[arguments[0]]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return arguments[0]
        if name == "nvmlDeviceGetP2PStatus":
            one, other, index = arguments
            return self.pairs[frozenset((one, other))][("read", "write", "nvlink", "atomics")[index]]
        return self._of_device(name, self.devices[arguments[0]], self.links[arguments[0]], *arguments[1:])

    def _of_device(self, name: str, device: dict[str, Any], links: list[dict[str, Any]], *arguments: Any) -> Any:
        if name == "nvmlDeviceGetFieldValues":
            speeds = self.speeds or {"GET_SPEED": links[arguments[0][0][1]]["speed_mbps"]}
            numbers = {getattr(pynvml, f"NVML_FI_DEV_NVLINK_{field}"): mbps for field, mbps in speeds.items()}
            asked = [numbers.get(number) for number, _ in arguments[0]]
            return [Answer(nvmlReturn=0 if mbps else 3, value=Answer(uiVal=mbps)) for mbps in asked]
        if name.startswith(LINK):
            link = links[arguments[0]] if arguments[0] < len(links) else {}
            if name == f"{LINK}Capability":
                assert arguments[1] == pynvml.NVML_NVLINK_CAP_P2P_ATOMICS
            return {
                f"{LINK}State": link.get("active"),
                f"{LINK}RemoteDeviceType": link.get("remote_type"),
                f"{LINK}RemotePciInfo": Answer(busId=link.get("remote_bus_id")),
                f"{LINK}Capability": link.get("atomics"),
            }[name]
        return {
            "nvmlDeviceGetUUID": device["uuid"],
            "nvmlDeviceGetMigMode": [int(self.is_mig), 0],
            "nvmlDeviceGetName": device["name"],
            "nvmlDeviceGetPciInfo_v3": Answer(busId=device["bus_id"].encode()),
            "nvmlDeviceGetPciInfo": None,
            "nvmlDeviceGetMemoryInfo": Answer(total=device["memory_bytes"]),
            "nvmlDeviceGetCudaComputeCapability": device["compute_capability"],
            "nvmlDeviceGetMaxPcieLinkGeneration": device["pcie_generation_max"],
            "nvmlDeviceGetMaxPcieLinkWidth": device["pcie_width_max"],
        }[name]


def through_driver(*arguments: Any, **options: Any) -> Topology:
    return read_topology(ask_driver(Library(*arguments, **options)), ())


@pytest.mark.parametrize("name", NAMES)
def test_the_driver_and_the_file_say_the_same(name: str) -> None:
    found = read_topology(ask_driver(Library(load(name))), seen(load(name)))
    assert found == topology(name)
    assert (found.driver_version, found.cuda_version) == (load(name)["driver_version"], load(name)["cuda_version"])


@pytest.mark.parametrize(
    ("question", "devices"),
    [
        *((f"nvmlDeviceGet{name}", 8) for name in ("P2PStatus", "Name", "PciInfo_v3")),
        *((f"nvmlDeviceGet{name}", 8) for name in ("MigMode", "FieldValues", "MaxPcieLinkWidth")),
        *((f"{LINK}{name}", 8) for name in ("State", "RemotePciInfo", "Capability")),
        *((f"nvmlDeviceGet{name}", 0) for name in ("Count", "UUID")),
        ("nvmlShutdown", 8),
    ],
)
def test_any_question_may_stay_without_an_answer(question: str, devices: int) -> None:
    found = through_driver(load("hgx-h100-nvswitch"), refused=question)
    assert len(found.devices) == devices
    assert isinstance(found.key, str)
    if question == "nvmlDeviceGetP2PStatus":
        assert {pair.read for pair in found.pairs} == {P2P.UNKNOWN}
        assert not unusable_pairs(found)


def test_the_speed_comes_from_the_field_of_all_links_or_from_the_table() -> None:
    for options, gbs in (
        ({"speeds": {"SPEED_MBPS_COMMON": 25781}}, 25.781),
        ({"refused": "nvmlDeviceGetFieldValues"}, 26.562),
        ({"speeds": {"GET_SPEED": 4_000_000_000}}, 26.562),  # not sane
    ):
        found = through_driver(load("hgx-h100-nvswitch"), **options)
        assert {pair.link_gbs for pair in found.pairs} == {gbs}
        assert found.key == "nvswitch-18x25"


def test_gpus_that_are_lost_or_cut_do_not_hide_the_others() -> None:
    snapshot = load("a6000-bridges")
    snapshot["devices"][1] = {"index": 1, "error": "GPU is lost"}
    found = through_driver(snapshot)
    assert found.lost == ("GPU1: GPU is lost",)
    assert [device.label for device in found.devices] == ["GPU0", "GPU2", "GPU3"]
    assert found.only(each.uuid for each in found.devices[1:3]).pairs[0].nvlinks == 4
    assert read_topology(snapshot, ()).devices == found.devices
    library = Library(load("pcie-only"))
    library.is_mig = True
    found = read_topology(ask_driver(library), ())
    assert (found.devices, found.lost[0]) == ((), "GPU0: in MIG mode (`nvidia-smi -mig 0` ends it)")


def test_no_driver_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(code: int) -> str:
        def fail() -> None:
            raise pynvml.NVMLError(code)

        return ask_driver(Answer(nvmlInit=fail, NVMLError=pynvml.NVMLError))["missing"]

    assert "kernel module is not loaded" in missing(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert missing(pynvml.NVML_ERROR_UNKNOWN) == "NVML does not start: Unknown Error"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    told = ask_driver()
    assert "nvidia-ml-py is not installed" in told["missing"]
    assert read_topology(told, ()) == Topology(missing=told["missing"])


def test_without_nvml_cuda_stands_in() -> None:
    cuda = [VisibleDevice(index=0, uuid="a", peers=(1,)), VisibleDevice(index=1, uuid="b", peers=(0,))]
    found = read_topology({"missing": "no NVML"}, [*cuda, VisibleDevice(index=2, uuid="c", peers=(0,))])
    assert [pair.read.name for pair in found.pairs] == ["OK", "NOT_SUPPORTED", "NOT_SUPPORTED"]
    assert {pair.atomics for pair in found.pairs} == {P2P.UNKNOWN}
    assert (found.key, found.missing, len(found.visible().devices)) == ("unknown", "no NVML", 3)
