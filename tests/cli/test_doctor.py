"""The doctor's findings on machines that are made up, and on this one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from odc_triton.machine.probe import VisibleDevice, read_topology
from odc_triton.machine.topology import Topology
from odc_triton.tools.doctor import Report, diagnose, examine, main, render
from odc_triton.tools.doctor.findings import NOTE, OK, PROBLEM, WIDTH
from odc_triton.tools.doctor.software import Software
from tests.support.snapshots import KEYS, NAMES, topology

NO_GPU = Topology(missing="no NVIDIA driver is installed here")
H100 = topology("hgx-h100-nvswitch")
CUDA_BUILD = Software(python="3.12.3", torch="2.13.0+cu128", cuda="12.8", triton="3.7.1")
CPU_BUILD = Software(python="3.11.7", torch="2.13.0+cpu", triton="3.7.1")


def report_on(
    found: Topology = H100,
    software: Software = CUDA_BUILD,
    environment: Mapping[str, str] | None = None,
    tried: str | None = None,
) -> Report:
    return diagnose(found, software, environment or {}, tried)


def bad(report: Report) -> list[tuple[str, str]]:
    """Level and topic of what is not ok."""
    return [(each.level, each.topic) for each in report.findings if each.level != OK]


def only(report: Report, level: str, topic: str) -> str:
    """Text and remedy of the only finding that is not ok, which must have that level and topic."""
    assert bad(report) == [(level, topic)], render(report)
    (found,) = [each for each in report.findings if each.level != OK]
    assert found.remedy, "says what to do"
    return f"{found.text} -> {found.remedy}"


def test_machines_without_a_problem() -> None:
    report = report_on()
    assert bad(report) == []
    text = render(report)
    assert "8 GPUs (NVIDIA H100 80GB HBM3); topology nvswitch-18x25" in text
    assert "all 28 pairs: access and native atomics, 478 GB/s per direction" in text
    assert "torch 2.13.0+cu128, CUDA 12.8; driver 570.124.06 supports CUDA 12.8" in text
    assert text.endswith("No problems, 0 notes: ranks can train here.")
    words = only(report_on(NO_GPU, CPU_BUILD), NOTE, "GPUs")
    assert words.startswith("none: no NVIDIA driver is installed here. Ranks train on the CPU -> ")


@pytest.mark.parametrize(
    ("change", "level", "topic", "words"),
    [
        ({"torch": "2.10.1"}, PROBLEM, "torch", "too old -> pip install 'torch>=2.11'"),
        ({"triton": "3.5.1"}, PROBLEM, "triton", "triton 3.5.1: too old -> pip install 'triton>=3.6'"),
        ({"cuda": None}, PROBLEM, "torch", "install a CUDA build of torch (pytorch.org/get-started)"),
        ({"cuda_error": "driver too old"}, PROBLEM, "torch", "does not start: driver too old -> check that nvidia-smi"),
    ],
)
def test_software(change: dict[str, Any], level: str, topic: str, words: str) -> None:
    assert words in only(report_on(software=replace(CUDA_BUILD, **change)), level, topic)


def test_environments() -> None:
    interpreted = {"TRITON_INTERPRET": "1"}
    assert "unset TRITON_INTERPRET" in only(report_on(environment=interpreted), PROBLEM, "triton")
    assert "(interpreting)" in render(report_on(NO_GPU, CPU_BUILD, interpreted))

    masked = replace(H100, devices=tuple(replace(device, cuda_index=None) for device in H100.devices))
    broken = replace(CUDA_BUILD, cuda_error="no device")
    for hidden, level in (("", NOTE), ("-1", NOTE), ("9", PROBLEM)):  # with the first two someone wants the CPU
        report = report_on(masked, broken, {"CUDA_VISIBLE_DEVICES": hidden})
        assert bad(report) == [(level, "torch"), (NOTE, "GPUs")]
        assert f"CUDA_VISIBLE_DEVICES={hidden!r} hides GPUs: unset it" in re.sub(r"\s+", " ", render(report))


def test_ranks_that_can_not_share_a_model() -> None:
    words = only(report_on(tried="memfd: not permitted"), PROBLEM, "ranks")
    assert words.startswith("two ranks can't share a model: memfd: not permitted -> allow memfd_create")


def test_gpus() -> None:
    devices = (replace(H100.devices[0], compute_capability=(7, 0)), *H100.devices[1:])
    old = only(report_on(replace(H100, devices=devices)), PROBLEM, "GPUs")
    assert "GPU0 (NVIDIA H100 80GB HBM3) is of compute capability 7.0; kernels need 8.0" in old
    assert "GPU7: lost" in only(report_on(replace(H100, lost=("GPU7: lost",))), PROBLEM, "GPUs")

    cuda = [VisibleDevice(index=index, uuid=str(index), peers=(1 - index,)) for index in range(2)]
    report = report_on(read_topology({"missing": "nvidia-ml-py is not installed"}, cuda))
    assert bad(report) == [(NOTE, "GPUs"), (NOTE, "peers")]
    assert "CUDA reports 2 GPUs; links and atomics are unknown: nvidia-ml-py is not installed" in render(report)
    assert "the driver does not report access or atomics of 1 of 1 pair" in render(report)


def test_pairs_that_can_not_share_a_model() -> None:
    words = only(report_on(topology("a6000-bridges")), PROBLEM, "peers")
    assert words.startswith("4 of 6 pairs: no native atomics over PCIe")
    assert "GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3" in words
    assert bad(report_on(topology("a6000-bridges", 0, 1))) == []
    masked = report_on(topology("a6000-bridges", 0))  # its job may have others: a note only
    assert "4 of 6 pairs of this machine's GPUs" in only(masked, NOTE, "peers")
    assert "1 of 4 visible to this process" in render(masked)


def test_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(report_on) == 0
    assert "No problems" in capsys.readouterr().out
    assert main(lambda: report_on(topology("pcie-only"))) == 1


def test_a_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main() == 1
    said = " ".join(capsys.readouterr().out.split())  # columns are as wide as what else is found
    assert "problem torch can't be imported (import of torch halted" in said
    assert "ranks" not in said


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    report = examine()
    found = {each.topic: each for each in report.findings}
    assert (report.software.torch, report.software.cuda) == (torch.__version__, torch.version.cuda)
    assert {"torch", "triton", "GPUs", "ranks"} <= set(found)
    assert found["ranks"].level == OK  # the other tests open heaps here
    assert len(report.topology.visible().devices) == torch.cuda.device_count()
    if not report.topology.devices:
        assert report.problems == ()
        assert report.topology.missing
    assert main(lambda: report) == bool(report.problems)
    assert all(len(line) <= WIDTH for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_tables_fit_and_are_aligned(name: str) -> None:
    found = topology(name)
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in render(report_on(found)).splitlines())
    assert found.key == KEYS[name]
