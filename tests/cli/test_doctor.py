"""The doctor's findings on machines that are made up: versions, GPUs and environment; and one run on this machine."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from odc_triton.cli.doctor import examine, main
from odc_triton.cli.doctor.findings import NOTE, OK, PROBLEM, WIDTH, as_json, render
from odc_triton.cli.doctor.system import Software
from odc_triton.cli.doctor.versions import TESTED
from odc_triton.machine.nvml import SnapshotNvml
from odc_triton.machine.probe import CudaDevice, read_topology
from tests.support.machines import CUDA_BUILD, H100, NO_GPU, Machine, bad, only
from tests.support.snapshots import load, seen, topology

CPU_BUILD = Software(python="3.11.7", torch="2.13.0+cpu", triton="3.7.1", transformers="5.23.0")


def test_a_good_machine_has_nothing_to_complain_of() -> None:
    report = examine(Machine(), H100)
    assert bad(report) == []
    text = render(report)
    assert "all 28 pairs: access and native atomics, 478 GB/s per direction" in text
    assert "torch 2.13.0+cu128, CUDA 12.8; driver 570.124.06 supports CUDA 12.8" in text
    assert "topology nvswitch-18x25" in text
    assert text.endswith("No problems, 0 notes.")


def test_a_machine_without_a_gpu_is_fine() -> None:
    report = examine(Machine(versions=CPU_BUILD), NO_GPU)
    assert bad(report) == [("GPUs", "none: no NVIDIA driver is installed here. The CPU backend needs none")]
    assert report.problems == ()


@pytest.mark.parametrize(
    ("versions", "level", "topic", "words"),
    [
        ({"torch": "2.10.1"}, PROBLEM, "torch", "too old -> pip install 'torch>=2.11'"),
        ({"triton": "3.5.1"}, PROBLEM, "triton", "not one of the tested versions, 3.6 to 3.9"),
        ({"triton": "3.10.0"}, NOTE, "triton", "not one of the tested versions, 3.6 to 3.9"),
        ({"triton": "3.9.0"}, NOTE, "triton", "requires 3.7.1 -> pip install triton==3.7.1"),
        ({"triton": None}, PROBLEM, "triton", "not installed"),
        ({"torch": "2.14.1+cu128"}, NOTE, "versions", "untested: torch 2.14.1+cu128 (tested: 2.11, 2.13, 2.15) -> run"),
        (
            {"triton": "3.8.0", "triton_pinned": None},
            NOTE,
            "versions",
            "untested: triton 3.8.0 (tested: 3.6, 3.7, 3.9)",
        ),
        ({"transformers": "5.30.0"}, NOTE, "versions", "untested: transformers 5.30.0"),
        ({"python": "3.14.1"}, NOTE, "versions", "untested: python 3.14.1 (tested: 3.10, 3.11, 3.12, 3.13)"),
        ({"symmetric_memory_error": "no such module"}, PROBLEM, "symm. memory", "can't be imported: no such module"),
        ({"architectures": ("sm_70", "sm_80")}, PROBLEM, "torch", "no kernels for GPU0, compute capability 9.0"),
    ],
)
def test_software(versions: dict[str, Any], level: str, topic: str, words: str) -> None:
    report = examine(Machine(versions=replace(CUDA_BUILD, **versions)), H100.only([H100.devices[0].uuid]))
    assert words in only(report, level, topic)


def test_tested_versions_are_those_of_the_constraints() -> None:
    root = Path(__file__).parents[2]
    pins = re.findall(r"^(\w+)==(\d+)\.(\d+)", "".join(p.read_text() for p in root.glob("constraints*.txt")), re.M)
    for name in ("torch", "triton", "transformers"):
        assert set(TESTED[name]) == {(int(major), int(minor)) for pin, major, minor in pins if pin == name}
    python = ", ".join(f"{major}.{minor}" for major, minor in TESTED["python"])
    assert f"| Python | 3.10 and newer | {python} |" in (root / "README.md").read_text()


@pytest.mark.parametrize(
    ("architectures", "runs"),
    [
        (("sm_90",), True),
        (("sm_90a",), True),
        (("sm_80",), False),
        (("sm_91",), False),
        (("compute_80",), True),  # PTX is compiled when loaded
        (("sm_100", "compute_100"), False),
        ((), True),  # unknown
    ],
)
def test_for_which_gpus_torch_has_kernels(architectures: tuple[str, ...], runs: bool) -> None:
    report = examine(Machine(versions=replace(CUDA_BUILD, architectures=architectures)), H100)
    assert (report.problems == ()) is runs


def test_cuda_that_does_not_start() -> None:
    masked = replace(H100, devices=tuple(replace(device, cuda_index=None) for device in H100.devices))
    broken = replace(CUDA_BUILD, torch="2.13.0+cu130", cuda="13.0", cuda_error="driver too old")
    problems = examine(Machine(versions=broken), masked).problems
    assert [each.topic for each in problems] == ["torch"]
    assert "install driver 580 or newer, or a torch built for CUDA 12.8" in problems[0].remedy
    problems = examine(Machine(versions=CPU_BUILD), masked).problems
    assert [each.remedy for each in problems] == ["install a CUDA build of torch (pytorch.org/get-started)"]

    hidden = Machine(versions=replace(broken, cuda="12.8"), environment={"CUDA_VISIBLE_DEVICES": ""})
    report = examine(hidden, masked)  # someone wants the CPU
    assert report.problems == ()
    assert {topic for topic, _ in bad(report, NOTE)} == {"torch", "GPUs"}


def test_gpus_that_are_too_old() -> None:
    report = examine(Machine(), topology("v100-cube-mesh", 0))
    assert ("GPUs", "GPU0 (Tesla V100-SXM2-32GB) is of compute capability 7.0; kernels need 8.0") in bad(
        report, PROBLEM
    )


def test_a_gpu_on_the_bus_that_is_out_of_reach() -> None:
    bus = "/sys/bus/pci/devices"
    machine = Machine(
        versions=CPU_BUILD,
        folders={bus: ["0000:00:00.0", "0000:17:00.0", "0000:18:00.0"]},
        files={
            f"{bus}/0000:00:00.0/vendor": "0x8086\n",
            f"{bus}/0000:17:00.0/vendor": "0x10de\n",
            f"{bus}/0000:17:00.0/class": "0x030200\n",
            f"{bus}/0000:18:00.0/vendor": "0x10de\n",
            f"{bus}/0000:18:00.0/class": "0x068000\n",  # an NVSwitch
        },
    )
    assert "1 NVIDIA GPU on the PCI bus, not accessible from here" in only(examine(machine, NO_GPU), NOTE, "GPUs")


def test_without_nvml_but_with_cuda() -> None:
    cuda = [CudaDevice(index=index, uuid=str(index), peers=(1 - index,)) for index in range(2)]
    report = examine(Machine(), read_topology(SnapshotNvml({"missing": "nvidia-ml-py is not installed"}), cuda))
    assert [topic for topic, _ in bad(report)] == ["GPUs", "peers"]
    assert report.problems == ()
    assert "the driver does not say what 1 of 1 pair" in render(report)


def test_pairs_that_can_not_share_a_model() -> None:
    report = examine(Machine(), topology("a6000-bridges"))
    words = only(report, PROBLEM, "peers")
    assert words.startswith("4 of 6 pairs: no native atomics over PCIe")
    assert "GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3" in words
    assert "these can share a model's shards: GPU0 GPU1; GPU2 GPU3" in render(report)
    assert bad(examine(Machine(), topology("a6000-bridges", 0, 1))) == []

    masked = examine(Machine(), topology("a6000-bridges", 0))  # its job may have others: a note only
    assert "4 of 6 pairs of this machine's GPUs" in only(masked, NOTE, "peers")
    assert "1 of 4 visible to this process" in render(masked)


def test_links_lanes_and_lost_gpus() -> None:
    assert "GPU3 runs on 8 of 16 lanes" in only(examine(Machine(), topology("a100-nvlink-mesh")), NOTE, "PCIe")
    snapshot = load("hgx-h100-nvswitch")
    snapshot["devices"][2]["links"][0]["active"] = 0
    found = read_topology(SnapshotNvml(snapshot), seen(snapshot))
    assert "GPU2 has 14 of 18 links up, others 18" in only(examine(Machine(), found), NOTE, "NVLink")
    assert "GPU7: lost" in only(examine(Machine(), replace(H100, lost=("GPU7: lost",))), PROBLEM, "GPUs")


@pytest.mark.parametrize(
    ("environment", "level", "topic", "words"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, PROBLEM, "allocator", "expandable segments conflict"),
        ({"PYTORCH_ALLOC_CONF": "a:1, expandable_segments: true"}, PROBLEM, "allocator", "PYTORCH_ALLOC_CONF="),
        ({"TORCH_SYMMMEM": "NVSHMEM"}, NOTE, "symm. memory", "TORCH_SYMMMEM=NVSHMEM"),
        ({"TRITON_INTERPRET": "1"}, PROBLEM, "triton", "unset TRITON_INTERPRET"),
        ({"TMPDIR": "/" + "t" * 100}, PROBLEM, "TMPDIR", "11 bytes too long"),
    ],
)
def test_environment(environment: dict[str, str], level: str, topic: str, words: str) -> None:
    assert words in only(examine(Machine(environment=environment), H100), level, topic)


def test_environments_that_are_fine() -> None:
    for environment in (
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_SYMMMEM_IMPLICIT_POOL": "0"},
        {"TORCH_SYMMMEM": "CUDA", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
    ):
        assert bad(examine(Machine(environment=environment), H100)) == [], environment
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TMPDIR": "/" + "t" * 100}
    report = examine(Machine(versions=CPU_BUILD, environment=conf), NO_GPU)
    assert report.problems == ()  # of no concern to a machine without a GPU


def test_the_exit_status_and_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    good, wrong = examine(Machine(), H100), examine(Machine(), topology("pcie-only"))
    assert main(False, lambda: good) == 0
    assert "No problems" in capsys.readouterr().out
    assert main(True, lambda: wrong) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == 2
    assert {each["level"] for each in said["findings"]} == {OK, PROBLEM}
    assert said["topology"]["key"] == "pcie-gen4x16"
    pair = said["topology"]["pairs"][0]
    assert (pair["read"], pair["atomics"], pair["is_usable"]) == ("OK", "NOT_SUPPORTED", False)
    assert pair["of"] == [device["uuid"] for device in said["topology"]["devices"][:2]]
    assert as_json(good)["problems"] == 0


def test_a_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main() == 1
    assert "problem  torch     can't be imported (import of torch halted" in capsys.readouterr().out


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    report = examine()
    found = {each.topic: each for each in report.findings}
    assert report.software.torch == torch.__version__
    assert report.software.cuda == torch.version.cuda
    assert {"torch", "triton", "GPUs", "TMPDIR", "ranks", "/dev/shm", "memory", "CPUs"} <= set(found)
    assert found["ranks"].level == OK  # the other tests open heaps here
    assert str(len(os.sched_getaffinity(0))) in found["CPUs"].text
    assert len(report.topology.visible().devices) == torch.cuda.device_count()
    if not report.topology.devices:
        assert report.problems == ()
        assert "The CPU backend needs none" in found["GPUs"].text
        assert report.topology.missing
    assert main(False, lambda: report) == bool(report.problems)
    assert all(len(line) <= WIDTH for line in capsys.readouterr().out.splitlines())
    assert not [name for name in os.listdir(os.environ.get("TMPDIR", "/tmp")) if name == f"odc-doctor-{os.getpid()}"]
