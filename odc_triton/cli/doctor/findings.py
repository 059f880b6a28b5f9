"""The doctor's findings, and the report that shows them."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from ...machine.topology import Pair, Topology
from .system import Software

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. Only a problem changes the command's exit status."""

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


WIDTH = 100


def dotted(compute_capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, compute_capability or ("?",)))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count_devices(topology: Topology) -> str:
    return count(len(topology.devices), "GPU")


def size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


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
    return {
        "problems": len(report.problems),
        "findings": [asdict(finding) for finding in report.findings],
        "software": asdict(report.software),
        "topology": {
            "key": topology.key,
            "visible_key": topology.visible().key,
            "driver_version": topology.driver_version,
            "cuda_version": topology.cuda_version,
            "missing": topology.missing,
            "lost": list(topology.lost),
            "devices": [asdict(device) for device in topology.devices],
            "pairs": [_pair_json(pair) for pair in topology.pairs],
        },
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "of": [pair.one.uuid, pair.other.uuid],
        "kind": pair.kind,
        **{name: getattr(pair, name).name for name in ("read", "write", "atomics", "path")},
        **{name: getattr(pair, name) for name in ("nvlinks", "through_switch", "link_gbs", "link_gbs_from", "gbs")},
        "is_usable": not pair.is_unusable,
    }
