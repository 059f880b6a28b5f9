"""docs/gpus.md and its tables have the sections of the suite for GPUs, its rules, and commands that it takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from bench.suites.gpu.__main__ import parsed
from bench.suites.gpu.plan import LISTS, LONGER, OPERATORS, QUARTER

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "gpus.md").read_text(encoding="utf-8")


def _table(name: str) -> list[tuple[str, ...]]:
    """Names, rules, and the last column."""
    assert f"(tables/{name}.md)\n" in PAGE
    part = (DOCS / "tables" / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", part, re.M)


def test_sections_and_their_rules() -> None:
    quarter = [(name, section.passes, section.says) for name, section in QUARTER.items()]
    assert _table("gpu_quarter") == quarter
    rules = {name.replace(f"sweep {OPERATORS[0]}", "sweep OPERATOR"): each for name, each in LONGER.items()}
    longer = [(name, each.passes, str(each.gpus)) for name, each in rules.items() if name[6:] not in OPERATORS]
    assert _table("gpu_longer") == longer


def test_commands() -> None:
    sections = {**LISTS["quarter"], **LISTS["longer"]}
    found = re.findall(r"^python -m bench\.suites\.gpu ((?:.*\\\n)*.*)$", PAGE, re.M)
    given = [parsed(shlex.split(words.replace("\\\n", "")), sections) for words in found]
    assert [(each.seconds, each.list, bool(each.only)) for each in given if not each.report] == [
        (420, "quarter", False),
        (230, "quarter", True),
        (1800, "longer", False),
    ]
    assert len(given) == 4
