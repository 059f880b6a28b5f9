"""The picture of `odc-triton topo`, and that tables fit."""

from __future__ import annotations

import pytest

from odc_triton.cli.doctor import draw_matrix, examine
from odc_triton.cli.doctor.findings import WIDTH, render
from odc_triton.machine.nvml import SnapshotNvml
from odc_triton.machine.probe import read_topology
from tests.support.machines import NO_GPU, Machine
from tests.support.snapshots import KEYS, NAMES, load, topology


@pytest.mark.parametrize("name", NAMES)
def test_tables_fit_and_are_aligned(name: str) -> None:
    found = topology(name)
    for text in (render(examine(Machine(), found)), draw_matrix(found)):
        assert all(len(line) <= WIDTH and line == line.rstrip() for line in text.splitlines())
    lines = draw_matrix(found).splitlines()
    assert lines[0].startswith(f"{KEYS[name]}: ")
    for device in found.devices:
        assert any(line.startswith(device.label) and device.bus_id[4:] in line for line in lines)


def test_the_picture() -> None:
    lines = draw_matrix(topology("a6000-bridges", 1)).splitlines()
    assert lines[2:7] == [
        "        GPU0       GPU1       GPU2       GPU3",
        "GPU0      .     NV4   56 + SYS   32 - SYS   32 -",
        "GPU1 NV4   56 +      .     SYS   32 - SYS   32 -",
        "GPU2 SYS   32 - SYS   32 -      .     NV4   56 +",
        "GPU3 SYS   32 - SYS   32 - NV4   56 +      .",
    ]
    text = "\n".join(lines)
    for words in (
        "NV#   # NVLinks, direct (14.062 each",
        "SYS   from socket",
        "  +     can share",
        "  -     access, but",
    ):
        assert words in text
    assert "  x  " not in text  # only what the picture shows is explained
    assert sum("masked" in line for line in lines) == 3
    assert sum("cuda:0" in line for line in lines) == 1
    assert "from a table" not in text
    assert "from a table" in draw_matrix(topology("v100-cube-mesh"))
    assert "GPU0      .     NODE  32 - SYS      x SYS      x" in draw_matrix(topology("pcie-only"))
    assert draw_matrix(NO_GPU) == "cpu: no GPU, no NVIDIA driver is installed here"
    assert "GPU0 " in draw_matrix(topology("one-of-a-container")).splitlines()[-1]


def test_the_picture_of_many_gpus() -> None:
    snapshot = load("pcie-only")
    device = snapshot["devices"][0]
    count = 40
    snapshot["devices"] = [
        device | {"index": n, "uuid": f"GPU-{n}", "bus_id": f"0000:{n:02x}:00.0"} for n in range(count)
    ]
    snapshot["pairs"] = []
    text = draw_matrix(read_topology(SnapshotNvml(snapshot), ()))
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert all(text.count(f"GPU{n} ") >= 3 for n in range(10, count))
    assert text.count("?") > count * (count - 1)
