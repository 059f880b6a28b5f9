"""The doctor's report: its findings, as a table or for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...machine.topology import Pair, Topology
from .findings import NOTE, PROBLEM, Finding, count, wrap
from .software import Software


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
        lines += wrap(finding.text, head, space)
        if finding.remedy:
            lines += wrap(finding.remedy, f"{space}-> ", f"{space}   ")
    problems, notes = len(report.problems), sum(finding.level == NOTE for finding in report.findings)
    lines += ["", f"{count(problems, 'problem') if problems else 'No problems'}, {count(notes, 'note')}."]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs: problems, findings, versions, devices, and pairs by the devices' UUIDs."""
    topology = report.topology
    about = {name: getattr(topology, name) for name in ("key", "driver_version", "cuda_version", "missing", "lost")}
    about |= {"visible_key": topology.visible().key, "devices": [asdict(device) for device in topology.devices]}
    return {
        "problems": len(report.problems),
        "findings": [asdict(finding) for finding in report.findings],
        "software": asdict(report.software),
        "topology": about | {"pairs": [_pair_json(pair) for pair in topology.pairs]},
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "of": [pair.one.uuid, pair.other.uuid],
        "kind": pair.kind,
        **{name: getattr(pair, name).name for name in ("read", "write", "atomics", "path")},
        **{name: getattr(pair, name) for name in ("nvlinks", "through_switch", "link_gbs", "gbs")},
        "is_usable": not pair.is_unusable,
    }
