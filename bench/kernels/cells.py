"""What the kernels' benchmark finds: cells, the targets that they must meet, and the report.

A cell is one operator on one problem, checked, and timed if there is a GPU. Each is appended to a file of lines
as it ends; the report is made from these. The targets are issue 3's for one H200, as data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Target:
    """Reached if `value` is at least (else: at most) `limit` in every timed cell that it `applies` to."""

    text: str
    applies: Callable[[Cell], bool]
    value: Callable[[Cell], float | None]
    limit: float
    at_least: bool = True

    def verdict(self, cells: Sequence[Cell]) -> dict[str, object]:
        """`verdict`: reached, missed or not measured; the worst value, its cell, and how many cells had one."""
        measured = [
            (value, cell.name) for cell in cells if self.applies(cell) and (value := self.value(cell)) is not None
        ]
        if not measured:
            return {"target": self.text, "verdict": "not measured", "worst": None, "cell": "", "cells": 0}
        worst, name = (min if self.at_least else max)(measured)
        reached = worst >= self.limit if self.at_least else worst <= self.limit
        return {
            "target": self.text,
            "verdict": "reached" if reached else "missed",
            "worst": worst,
            "cell": name,
            "cells": len(measured),
        }


def ratio(*baselines: str) -> Callable[[Cell], float | None]:
    """The fastest of these against ours: its time over ours."""

    def value(cell: Cell) -> float | None:
        found = [cell.ratios[name]["median"] for name in baselines if name in cell.ratios]
        return min(found, default=None)

    return value


def times(baseline: str) -> Callable[[Cell], float | None]:
    """Ours over the baseline's time."""
    return lambda cell: 1 / cell.ratios[baseline]["median"] if baseline in cell.ratios else None


def over_the_slower(*baselines: str) -> Callable[[Cell], float | None]:
    """Ours over the longest of these times."""

    def value(cell: Cell) -> float | None:
        if not {"ours", *baselines} <= set(cell.us):
            return None
        return cell.us["ours"]["p50"] / max(cell.us[name]["p50"] for name in baselines)

    return value


def memory_share(cell: Cell) -> float | None:
    """Peak memory of a call over the size of what it never holds whole."""
    return cell.peak_bytes / cell.whole_bytes if cell.peak_bytes is not None and cell.whole_bytes else None


def _loopback(*operators: str, least_tokens: int = 0, most_tokens: int = 1 << 30) -> Callable[[Cell], bool]:
    def applies(cell: Cell) -> bool:
        named = cell.peers == "loopback" and cell.operator in operators
        return named and least_tokens <= cell.tokens <= most_tokens

    return applies


_staged = _loopback("linear staged", least_tokens=4096)
_heads = ("linear_cross_entropy", "linear_cross_entropy_grad")

TARGETS = (
    Target(
        text="staged linear of Llama-3-8B's blocks, T >= 4096: >= 0.95 of torch.mm on a local weight",
        applies=lambda cell: _staged(cell) and cell.model == "llama-3-8b" and cell.layer != "head",
        value=ratio("torch.mm"),
        limit=0.95,
    ),
    Target(
        text="direct linear, T <= 128: >= 1.0 of copy, then torch.mm",
        applies=_loopback("linear direct", "linear_dx direct", most_tokens=128),
        value=ratio("copy, torch.mm"),
        limit=1.0,
    ),
    Target(
        text="wgrad into peers: >= 1.15 of torch.mm, then an accumulation of its own (the faster of two)",
        applies=_loopback("wgrad"),
        value=ratio("torch.mm, add", "torch.mm, scatter"),
        limit=1.15,
    ),
    Target(
        text="gather, scatter: >= 0.9 of a device copy by bytes moved",
        applies=_loopback("gather", "scatter"),
        value=ratio("device copy"),
        limit=0.9,
    ),
    Target(
        text="linear_cross_entropy and its gradient, T >= 4096: peak memory <= 1/8 of the logits",
        applies=_loopback(*_heads, least_tokens=4096),
        value=memory_share,
        limit=1 / 8,
        at_least=False,
    ),
    Target(
        text="linear_cross_entropy and its gradient, T >= 4096: time <= 1.1 of its torch.mm chunks alone",
        applies=_loopback(*_heads, least_tokens=4096),
        value=times("torch.mm chunks"),
        limit=1.1,
        at_least=False,
    ),
    Target(
        text="staged linear, peers in host memory: time <= 1.15 of the longer of compute alone and link alone",
        applies=lambda cell: cell.peers == "pinned" and cell.operator == "linear staged",
        value=over_the_slower("torch.mm", "copy"),
        limit=1.15,
        at_least=False,
    ),
)


def wanted_first(cell: Cell) -> int:
    """0: for the first half hour on a GPU, the layers of one model under training's load; 1: cells with a target;
    2: the others.
    """
    if cell.model == "llama-3-8b" and cell.world == 8 and cell.tokens in (0, 4096):
        return 0
    return 1 if any(target.applies(cell) for target in TARGETS) else 2


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

    def targets(self) -> list[dict[str, object]]:
        return [target.verdict(self.cells) for target in TARGETS]

    def save(self, folder: Path) -> None:
        data = {**self.about, "passed": self.passed, "cells": [plain(cell) for cell in self.cells]}
        data |= {"targets": self.targets()}
        data |= {"left_out": self.left_out, "not_ended": self.begun}
        write_file(folder / "kernels.json", json.dumps(data, indent=1).encode())
        write_file(folder / "kernels.md", self.text().encode())

    def text(self) -> str:
        """Both tables, and what they were measured on, as Markdown."""
        about = [f"{key}: {value}" for key, value in self.about.items() if value is not None]
        parts = [WARNING] * bool(self.about.get("rehearsal"))
        parts += ["\n".join(f"- {line}" for line in about), table([row_of(cell) for cell in self.cells], COLUMNS)]
        verdicts = [[*(found.values())] for found in self.targets()]
        parts.append(table(verdicts, ("target", "verdict", "worst", "in", "cells")))
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
