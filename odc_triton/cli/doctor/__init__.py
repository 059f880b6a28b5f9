"""`odc-triton doctor`: problems that would keep ranks from training here; and the picture of `odc-triton topo`.

The report has results of torch, NVML's status of pairs of GPUs, and one real trial of two ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from json import dumps

from ...machine.probe import read_topology
from ...machine.topology import Topology
from .gpus import check_gpus, check_peers
from .matrix import draw_matrix
from .report import Report, as_json, render
from .software import Software, check_tested, check_torch, check_triton, installed_software
from .trial import check_ranks, try_ranks

__all__ = ["draw_matrix", "examine", "main"]


def examine() -> Report:
    """Examines this machine and its software. Starts CUDA if there is a GPU, and two ranks."""
    software = installed_software()
    tried = try_ranks() if software.torch is not None else None
    return diagnose(read_topology(), software, os.environ, tried)


def diagnose(topology: Topology, software: Software, environment: Mapping[str, str], tried: str | None) -> Report:
    """The findings on a machine. `tried`: the error when two ranks shared a model."""
    visible = topology.visible()
    findings = (
        *check_torch(software, topology, environment),
        *check_triton(software, visible, environment),
        *check_tested(software),
        *check_gpus(topology),
        *check_peers(topology),
        *(check_ranks(tried) if software.torch is not None else ()),
    )
    return Report(topology=topology, software=software, findings=findings)


def main(json: bool = False, examine: Callable[[], Report] = examine) -> int:
    """Prints the report; returns 1 if there is a problem."""
    report = examine()
    print(dumps(as_json(report), indent=2) if json else render(report))
    return 1 if report.problems else 0
