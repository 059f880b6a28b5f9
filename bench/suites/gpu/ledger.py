"""What the suite has found so far: lines of outcomes.jsonl, and what they come to for code, GPU and versions as now."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.provenance import append_line, read_lines

LINES = "outcomes.jsonl"


def key_of(about: dict[str, Any]) -> str:
    """Names what a result depends on, as PLACE-CODE: one of another GPU, torch or code proves nothing here."""
    same = [about.get(name) for name in ("versions", "gpus", "rehearsal")]
    text = json.dumps([(about.get("gpu") or {}).get("name"), *same], sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{about.get('source')}"


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """`key`: whose results count now, and with `any_code` also those of other code: after a fix, what it can't have
    touched need not run again.
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
    """All that is known of one stage: the last outcome of every test, check and run, by name; how it ended last.

    `running`: tests that began and did not end. `ended`: None where a kill came before its end. `said`: the end of what
    a process printed that did not end as it should.
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
