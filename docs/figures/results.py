"""What charts read, and the tables of the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
NAMES = {"longalign": "LongAlign", "swe-smith": "SWE-Smith", "aime": "AIME"}


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def shown(way: str) -> str:
    """How a page calls a way of a file."""
    return way.replace("layer barrier", "per-layer barrier")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for docs/tables; after the first, columns with numbers are at the right. Numbers are not broken."""
    numbers = [any(cell.strip("+-")[:1].isdigit() for cell in column) for column in zip(*rows, strict=True)]
    rule = ["---", *("--:" if number else "---" for number in numbers[1:])]
    whole = [[cell.replace(" ", "\N{NO-BREAK SPACE}") if cell[:1].isdigit() else cell for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (columns, rule, *whole))
