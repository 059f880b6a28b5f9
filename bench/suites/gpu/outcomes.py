"""What the suite has found so far: lines of outcomes.jsonl, and what they show for the current code, GPU and versions.

The report, gpu_suite.json and gpu_suite.md, is built from these lines alone: it needs no GPU, and no stage to be over.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odc_triton.base.files import write_file
from odc_triton.base.report import table

from ...provenance import WARNING, append_line, read_lines, save_json

LINES = "outcomes.jsonl"
_SAID = ("hardware", "commit")  # at the top
ONE_GPU = (
    "One GPU: what its processes read from each other is this GPU's own memory. No time or rate here says anything"
    " about NVLink, least of all those of staged weights: their copies then compete with kernels for multiprocessors."
)


def key_of(about: dict[str, Any]) -> str:
    """Names what a result depends on, as PLACE-CODE: a result from another GPU, torch or code proves nothing here."""
    same = [about.get(name) for name in ("versions", "gpus", "rehearsal")]
    text = json.dumps([(about.get("gpu") or {}).get("name"), *same], sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{about.get('source')}"


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """`key`: whose results count now, and with `any_code` also those of other code: after a fix, what it can't have
    affected need not rerun.
    """

    folder: Path
    key: str
    any_code: bool = False

    def add(self, kind: str, **record: Any) -> None:
        append_line(self.folder / LINES, {"key": self.key, "kind": kind} | record)

    def stage(self, name: str) -> Found:
        place = self.key.partition("-")[0] if self.any_code else self.key
        return found_of(name, [record for record in read_lines(self.folder / LINES) if record["key"].startswith(place)])


@dataclass(kw_only=True)
class Found:
    """All that is known about one stage: the last outcome of every test, check and run, by name; how it last ended.

    `running`: tests that began and did not end. `ended`: None if it was killed before its end. `said`: the last output
    of a process that did not end as it should.
    """

    stage: str
    begun: bool = False
    ended: dict[str, Any] | None = None
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.ended is not None and self.ended["passed"]

    @property
    def counts(self) -> Counter[str]:
        return Counter(test["outcome"] for test in self.tests.values())

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [test for test in self.tests.values() if test["outcome"] == "failed"]

    @property
    def verdict(self) -> str:
        if not self.begun:
            return "not run"
        if self.ended is None:
            return "killed before its end"
        if self.ended["passed"]:
            return "passed"
        return "cut short, nothing failed" if self.ended["cut"] else "FAILED"


def found_of(name: str, records: list[dict[str, Any]]) -> Found:
    found = Found(stage=name)
    for record in records:
        if record.get("stage") != name:
            continue
        kind = record["kind"]
        if kind == "begin":
            found.begun, found.ended, found.running, found.said = True, None, [], []
        elif kind == "end":
            found.ended = record
        elif kind == "test begins":
            found.running.append(record["test"])
        elif kind == "test":
            found.tests[record["test"]] = record
            found.running = [test for test in found.running if test != record["test"]]
        elif kind == "run":
            found.runs[record["name"]] = record
        elif kind == "said":
            found.said.append(record["text"])
    return found


def machines(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The description of each code, GPU and set of versions, and its lines; the last one first."""
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_lines(folder / LINES):
        lines = records.pop(record["key"], []) if record["kind"] == "about" else records.setdefault(record["key"], [])
        lines.append(record)
        records[record["key"]] = lines
    found = []
    for lines in reversed(records.values()):
        about = [line["about"] for line in lines if line["kind"] == "about"]
        found.append((about[-1] if about else {}, lines))
    return found


def write_report(folder: Path, names: list[str]) -> None:
    """Both files. `names`: the stages, in order."""
    found = []
    for about, lines in machines(folder):
        stages = [stage for stage in (found_of(name, lines) for name in names) if stage.begun]
        found.append((about, stages))
    rehearsal = any(about.get("rehearsal") for about, _ in found)
    data = [{"about": about, "stages": {stage.stage: _plain(stage) for stage in stages}} for about, stages in found]
    record = {"rehearsal": rehearsal, "machines": data}
    save_json(folder / "gpu_suite.json", record)
    text = [WARNING, ""] * rehearsal
    for about, stages in found:
        text += [*_head(about, stages), ""]
        for stage in stages:
            text += [*_details(stage), ""]
    write_file(folder / "gpu_suite.md", "\n".join(text).encode())


def _plain(stage: Found) -> dict[str, Any]:
    return {
        "verdict": stage.verdict,
        "seconds": stage.ended["seconds"] if stage.ended else None,
        "counts": dict(stage.counts),
        "failures": [{key: test[key] for key in ("test", "seconds", "text")} for test in stage.failures],
        "running_at_the_end": stage.running,
        "runs": {
            name: {key: record.get(key) for key in ("passed", "cut", "seconds", "exit", "data", "text")}
            for name, record in stage.runs.items()
        },
        "slowest": [[test["test"], test["seconds"]] for test in _slowest(stage)],
        "said": stage.said,
    }


def _slowest(stage: Found, count: int = 5) -> list[dict[str, Any]]:
    return sorted(stage.tests.values(), key=lambda test: -test["seconds"])[:count]


def _head(about: dict[str, Any], stages: list[Found]) -> list[str]:
    gpu = about.get("gpu") or {}
    lines = [f"# {gpu.get('name', 'no GPU')}, commit {about.get('commit', 'unknown')}", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key not in ("commit", "rehearsal")]
    if about.get("gpus") == 1:
        lines += ["", ONE_GPU]
    rows = [[stage.stage, stage.verdict, stage.ended and stage.ended["seconds"], _summary(stage)] for stage in stages]
    return [*lines, "", table(rows, ("stage", "verdict", "seconds", "what came of it"))]


def _summary(stage: Found) -> str:
    parts = []
    if stage.tests:
        parts.append(", ".join(f"{stage.counts[name]} {name}" for name in ("passed", "failed", "skipped")))
    if stage.runs:
        counts = Counter(_end_of(record) for record in stage.runs.values())
        parts.append("runs: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    if stage.ended and "cells" in stage.ended:
        parts.append(f"{stage.ended['cells']} cells, in kernels.md")
    if stage.ended and "note" in stage.ended:
        parts.append(stage.ended["note"])
    if stage.running:
        parts.append(f"running at the end: {', '.join(stage.running)}")
    return "; ".join(parts)


def _details(stage: Found) -> list[str]:
    lines = [f"## {stage.stage}: {stage.verdict}", "", _summary(stage), ""]
    for name, record in stage.runs.items():
        lines.append(f"- {name}: {_end_of(record)}{_in_short(record.get('data') or {})}")
        if record.get("text"):
            lines += ["", "```", record["text"], "```", ""]
    for failure in stage.failures:
        lines += ["", f"### {failure['test']}", "", "```", failure["text"], "```"]
    for text in filter(None, stage.said):
        lines += ["", "What the process said last:", "", "```", text, "```"]
    return lines


def _end_of(run: dict[str, Any]) -> str:
    if run["passed"] is None:
        return "killed before its end"
    if run["passed"]:
        return "passed"
    return "cut short" if run.get("cut") else "FAILED"


def _in_short(data: dict[str, Any]) -> str:
    """The part of a run's findings that fits on a line; the JSON file has all."""
    if "losses" in data:
        return f", loss {data['first']} in the first ten steps, {data['last']} in the last ten of {len(data['losses'])}"
    words = {key: value for key, value in data.items() if isinstance(value, str | int | float) and key not in _SAID}
    return "".join(
        f", {key}: {str(value).strip().splitlines()[-1]}" for key, value in words.items() if str(value).strip()
    )
