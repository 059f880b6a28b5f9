"""Writes what was measured: the table of one place."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...base.files import write_file
from ...machine.topology import Place
from ...nn.tuned import FORMAT, Line, load, versions


def save(place: Place, lines: list[Line], folder: Path, attention: dict[str, float] | None = None) -> Path:
    """Writes the table of this place; keeps its lines for other shapes and dtypes, and `attention` of other models."""
    folder.mkdir(parents=True, exist_ok=True)
    table = load(place, folder)
    former = table.lines
    new = {(line.operator, line.shape, line.dtype) for line in lines}
    kept = [line for line in former if (line.operator, line.shape, line.dtype) not in new]
    content = {
        "format": FORMAT,
        "place": asdict(place),
        "versions": versions(),
        "lines": [_write_line(line) for line in [*kept, *lines]],
        "attention": table.attention | (attention or {}),
    }
    path = folder / place.file_name
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def _write_line(line: Line) -> dict[str, Any]:
    tiles = [
        {"kernel": kernel, "kind": type(tile).__name__, "sizes": asdict(tile)} for kernel, tile in line.choice.tiles
    ]
    return vars(line) | {"choice": line.choice.words, "tiles": tiles}
