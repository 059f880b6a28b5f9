"""How a stage of the GPU suite ended, and the files that say so."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Outcome:
    """How a stage ended. `details`: lines for people; `data`: for the JSON file."""

    stage: str
    passed: bool
    seconds: float
    details: list[str]
    data: dict[str, Any] = field(default_factory=dict)


def write(outcome: Outcome, about: dict[str, Any], out: Path) -> None:
    """FOLDER/gpu_<stage>.json and .md."""

    from odc_triton.atomic import write_file

    record = about | {"stage": outcome.stage, "passed": outcome.passed, "seconds": round(outcome.seconds, 1)}
    write_file(out / f"gpu_{outcome.stage}.json", (json.dumps(record | outcome.data, indent=1) + "\n").encode())
    head = [f"# {outcome.stage}: {'passed' if outcome.passed else 'FAILED'} in {outcome.seconds:.0f} s", ""]
    head += [f"{key}: {value}" for key, value in about.items()] + [""]
    write_file(out / f"gpu_{outcome.stage}.md", ("\n".join(head + outcome.details) + "\n").encode())
