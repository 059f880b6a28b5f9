"""What this machine can do, what it can't and why: the report of `odc-triton doctor`, the picture of `odc-triton topo`.

Every question to the system goes through `System`, so that tests can simulate any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from json import dumps

from ...machine.probe import read_topology
from ...machine.topology import Topology
from .findings import Report, as_json, render
from .gpus import check_gpus, check_links, check_peers, draw_matrix
from .host import (
    check_allocator,
    check_cpus,
    check_memory,
    check_ranks,
    check_shm,
    check_sockets,
    check_stale_sockets,
    check_symmetric_memory,
)
from .system import System, ThisMachine
from .versions import check_tested, check_torch, check_triton

__all__ = ["draw_matrix", "examine", "main"]


def examine(system: System | None = None, topology: Topology | None = None) -> Report:
    """Looks at this machine and at what is installed. Starts CUDA if there is a GPU, and two ranks."""
    system = ThisMachine() if system is None else system
    topology = read_topology() if topology is None else topology
    software = system.software()
    visible = topology.visible()
    findings = (
        *check_torch(software, topology, system.environment),
        *check_triton(software, visible, system.environment),
        *check_tested(software),
        *check_gpus(topology, system),
        *check_links(topology),
        *check_peers(topology),
        *check_symmetric_memory(software, visible, system.environment),
        *check_sockets(visible, system),
        *check_stale_sockets(system),
        *check_allocator(visible, system.environment),
        *(check_ranks(system) if software.torch is not None else ()),
        *check_shm(system),
        *check_memory(system),
        *check_cpus(system),
    )
    return Report(topology=topology, software=software, findings=findings)


def main(json: bool = False, examine: Callable[[], Report] = examine) -> int:
    """Prints the report; returns 1 if there is a problem."""
    report = examine()
    print(dumps(as_json(report), indent=2) if json else render(report))
    return 1 if report.problems else 0
