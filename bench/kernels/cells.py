"""What the kernels' benchmark finds: cells, and the report.

A cell is one operator on one problem, checked, and timed if there is a GPU. Each is appended to a file of lines
as it ends; the report is made from these. The targets are issue 3's for one H200, as data.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from odc_triton.base.files import write_file
from odc_triton.base.report import table

from ..provenance import WARNING, read_lines
from .problem import Operator, Problem

LINES = "kernels.jsonl"


@dataclass(kw_only=True)
class Cell:
    """`errors`: each result's largest difference over the reference's largest number. `fault`: why the check failed.
    For "ours" and every baseline: `us`, quantiles in microseconds; `ratios`, the baseline's time over ours in the
    same round, median and 95% interval, above 1 where ours is faster; `missing`, why one was not timed.
    """

    operator: str
    model: str
    layer: str
    rows: int
    columns: int
    tokens: int
    world: int
    dtype: str
    peers: str
    passed: bool | None = None
    errors: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    us: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    tflops: float | None = None
    hbm_gb_s: float | None = None
    link_gb_s: float | None = None
    of_roofline: float | None = None
    peak_bytes: int | None = None
    whole_bytes: int = 0

    @classmethod
    def of(cls, operator: Operator, problem: Problem) -> Cell:
        return cls(
            operator=operator.name,
            model=problem.model.name,
            layer=problem.layer.name,
            rows=problem.layer.rows,
            columns=problem.layer.columns,
            tokens=problem.tokens,
            world=problem.world,
            dtype=str(problem.dtype).removeprefix("torch."),
            peers=problem.peers,
        )

    @property
    def name(self) -> str:
        tokens = f", {self.tokens} tokens" if self.tokens else ""
        return f"{self.operator}, {self.model} {self.layer} [{self.rows}, {self.columns}]{tokens}, world {self.world}"


def plain(cell: Cell) -> dict[str, Any]:
    """A cell for JSON, which has no infinity: the error of a result that was not written."""
    errors = {name: error if math.isfinite(error) else None for name, error in cell.errors.items()}
    return asdict(cell) | {"errors": errors}


def wanted_first(cell: Cell) -> int:
    """0: for the first half hour on a GPU, the layers of one model under training's load; 1: the others."""
    return int(not (cell.model == "llama-3-8b" and cell.world == 8 and cell.tokens in (0, 4096)))


@dataclass(kw_only=True)
class Report:
    """All that a run found. `left_out`: cells that were not begun or did not fit, each with the reason. `begun`: names
    of cells that earlier runs began and did not end.
    """

    cells: list[Cell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, about: dict[str, Any] | None = None) -> Report:
        """What kernels.jsonl holds of runs like `about`, by default like the last one, whose cells may share a table.
        Its `about` is that of the first of them, so a later run continues with its seed.
        """
        records = read_lines(folder / LINES)
        if about is None:
            about = next((record["about"] for record in reversed(records) if "about" in record), {})
        report, counts, known, ended = cls(about=about), False, False, set()
        for record in records:
            if "about" in record:
                counts = _alike(record["about"]) == _alike(about)
                report.left_out = []
                if counts and not known:
                    report.about, known = record["about"], True
            elif not counts:
                continue
            elif "left_out" in record:
                report.left_out = record["left_out"]
            elif "begin" in record:
                report.begun.append(record["begin"])
            elif "left" in record:
                ended.add(record["left"])
            elif "cell" in record:
                report.cells.append(Cell(**record["cell"]))
                ended.add(report.cells[-1].name)
        report.begun = [name for name in dict.fromkeys(report.begun) if name not in ended]
        return report

    @property
    def passed(self) -> bool:
        return bool(self.cells) and all(cell.passed for cell in self.cells)

    def save(self, folder: Path) -> None:
        data = {**self.about, "passed": self.passed, "cells": [plain(cell) for cell in self.cells]}
        data |= {"left_out": self.left_out, "not_ended": self.begun}
        write_file(folder / "kernels.json", json.dumps(data, indent=1).encode())
        write_file(folder / "kernels.md", self.text().encode())

    def text(self) -> str:
        """The table, and what it was measured on, as Markdown."""
        about = [f"{key}: {value}" for key, value in self.about.items() if value is not None]
        parts = [WARNING] * bool(self.about.get("rehearsal"))
        parts += ["\n".join(f"- {line}" for line in about), table([row_of(cell) for cell in self.cells], COLUMNS)]
        if self.left_out:
            parts.append("Left out:\n" + "\n".join(f"- {line}" for line in self.left_out))
        if self.begun:
            parts.append("Begun, and cut short by a kill or a hang:\n" + "\n".join(f"- {name}" for name in self.begun))
        return "\n\n".join(parts) + "\n"


def _alike(about: dict[str, Any]) -> str:
    """What two runs must have in common for their cells to share a table."""
    same = ("source", "timed", "rehearsal", "peers", "dtype", "versions")
    return json.dumps([(about.get("gpu") or {}).get("name"), *(about.get(name) for name in same)], sort_keys=True)


COLUMNS = (
    *("operator", "model", "layer", "N x K", "tokens", "world", "check", "p20 us", "p50 us", "p80 us"),
    *("TFLOP/s", "HBM GB/s", "link GB/s", "of roofline", "faster than (95% interval)"),
)


def row_of(cell: Cell) -> list[object]:
    ours = cell.us.get("ours", {})
    ratios = [f"{name} {r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for name, r in cell.ratios.items()]
    ratios += [f"{name}: {why}" for name, why in cell.missing.items()]
    worst = max((math.inf if error is None else error for error in cell.errors.values()), default=0.0)
    return [
        cell.operator,
        cell.model,
        cell.layer,
        f"{cell.rows} x {cell.columns}",
        cell.tokens or None,
        cell.world,
        f"passed, {worst:.1e}" if cell.passed else f"FAILED: {cell.fault}",
        *(ours.get(name) for name in ("p20", "p50", "p80")),
        cell.tflops,
        cell.hbm_gb_s,
        cell.link_gb_s,
        cell.of_roofline,
        "; ".join(ratios),
    ]
