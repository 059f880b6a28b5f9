"""`odc-triton doctor`: problems that would keep ranks from training here.

It has results of torch, NVML's status of pairs of GPUs, and one real trial of two ranks.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...machine.probe import read_topology
from ...machine.topology import Topology
from .findings import NOTE, PROBLEM, WIDTH, Finding, count
from .gpus import check_gpus, check_peers
from .software import Software, check_torch, check_triton, installed_software
from .trial import check_ranks, try_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `examine`."""

    topology: Topology
    software: Software
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == PROBLEM)


def render(report: Report) -> str:
    """The findings as a table of at most 100 columns."""
    wide = max(len(finding.topic) for finding in report.findings)
    lines = []
    for finding in report.findings:
        head = f"{finding.level:<7}  {finding.topic:<{wide}}  "
        space = " " * len(head)
        lines += _wrap(finding.text, head, space)
        if finding.remedy:
            lines += _wrap(finding.remedy, f"{space}-> ", f"{space}   ")
    problems, notes = len(report.problems), sum(finding.level == NOTE for finding in report.findings)
    said = "" if problems else ": ranks can train here"
    lines += ["", f"{count(problems, 'problem') if problems else 'No problems'}, {count(notes, 'note')}{said}."]
    return "\n".join(lines)


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


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
        *check_gpus(topology),
        *check_peers(topology),
        *(check_ranks(tried) if software.torch is not None else ()),
    )
    return Report(topology=topology, software=software, findings=findings)


def main(examine: Callable[[], Report] = examine) -> int:
    """Prints the report; returns 1 if there is a problem."""
    report = examine()
    print(render(report))
    return 1 if report.problems else 0
