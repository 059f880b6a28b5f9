"""Made-up machines for the doctor to examine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from odc_triton.cli.doctor.findings import OK, Report, render
from odc_triton.cli.doctor.system import Software
from odc_triton.machine.topology import Topology
from tests.support.snapshots import topology

NO_GPU = Topology(missing="no NVIDIA driver is installed here")
GIB = 1 << 30


CUDA_BUILD = Software(
    python="3.12.3",
    torch="2.13.0+cu128",
    cuda="12.8",
    architectures=("sm_80", "sm_86", "sm_90", "sm_100", "compute_120"),
    triton="3.7.1",
    triton_pinned="3.7.1",
)


@dataclass
class Machine:
    """A `System` on which everything is well, except what a test changes."""

    versions: Software = CUDA_BUILD
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, list[str]] = field(default_factory=dict)
    shm: tuple[int, int] | None = (64 * GIB, 63 * GIB)
    ranks_error: str | None = None
    socket_errors: Mapping[str, str] = field(default_factory=dict)  # by the beginning of the path
    cpu_count: int = 64
    tried: list[str] = field(default_factory=list)

    def software(self) -> Software:
        return self.versions

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        return self.folders.get(folder, [])

    def space(self, folder: str) -> tuple[int, int] | None:
        return self.shm

    def cpus(self) -> int:
        return self.cpu_count

    def try_ranks(self) -> str | None:
        return self.ranks_error

    def try_socket(self, path: str) -> str | None:
        self.tried.append(path)
        return next((error for start, error in self.socket_errors.items() if path.startswith(start)), None)


def bad(report: Report, level: str | None = None) -> list[tuple[str, str]]:
    """(topic, text) of what is not ok, or of one level."""
    return [
        (each.topic, each.text)
        for each in report.findings
        if (each.level != OK if level is None else each.level == level)
    ]


def only(report: Report, level: str, topic: str) -> str:
    """Text and remedy of the only finding that is not ok, which must have that level and topic."""
    found = [each for each in report.findings if each.level != OK]
    assert [(each.level, each.topic) for each in found] == [(level, topic)], render(report)
    assert found[0].remedy, "says what to do"
    return f"{found[0].text} -> {found[0].remedy}"


H100 = topology("hgx-h100-nvswitch")
