"""What the doctor found."""

from __future__ import annotations

from dataclasses import dataclass

from ...machine.topology import Topology
from .machine import Software

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. Only a problem changes the command's exit status."""

    level: str
    topic: str
    text: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `examine` found."""

    topology: Topology
    software: Software
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == PROBLEM)
