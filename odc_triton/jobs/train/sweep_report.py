"""The table and the chart of a sweep's runs, from what these have written."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...base.files import write_file
from ..options.config_file import written_options
from ..options.options import flag
from ..reports.report import Curves, can_draw, curves_part, facts_part, save_html, table, table_part, text_part
from .metrics import Metrics, read_metrics
from .prepare import CONFIG
from .sweep_options import Sweep

_CURVES = ("loss", "eval_loss")


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """`where`: the ranks that it ran on. `error`: why it failed."""

    name: str
    where: str
    status: Literal["ended", "stopped", "failed"] = "ended"
    error: str = ""


def write_summary(sweep: Sweep, outcomes: list[RunEnd]) -> None:
    """Prints the table, best run first; writes sweep.json and sweep.html into the sweep's folder."""
    found = {outcome.name: outcome for outcome in outcomes}
    lines = {name: read_metrics(Path(options.out) / "metrics.jsonl") for name, options in sweep.runs.items()}
    rows = [_row(sweep, name, found.get(name), lines[name]) for name in sweep.runs]
    rows.sort(key=lambda row: (row["status"] != "ended", *(min(math.inf, _number(row[of])) for of in _CURVES[::-1])))
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [[row[name] for name in columns] for row in rows]
    folder = Path(sweep.out)
    errors = {outcome.name: outcome.error for outcome in outcomes if outcome.error}
    record = {"runs": rows, "errors": errors, "where": [asdict(outcome) for outcome in outcomes]}
    status = [row["status"] for row in rows]
    summary = f"{status.count('ended')} of {len(rows)} runs have ended, with report.html and adapter/ in their folders."
    summary += " Continue with --resume auto." * bool({"stopped", "waiting"} & {*status})
    with contextlib.suppress(OSError):  # a closed pipe
        print(f"{table(cells, columns)}\n{summary}\nsweep.html and sweep.json are in {folder}", flush=True)
    write_file(folder / "sweep.json", json.dumps(record, indent=1).encode())
    values = {name: {run: [_number(line.get(name)) for line in lines[run]] for run in lines} for name in _CURVES}
    curves = [
        Curves(title=name, values={run: own for run, own in of.items() if any(each == each for each in own)})
        for name, of in values.items()
    ]
    save_html(
        folder / "sweep.html",
        title="odc-triton sweep",
        parts=[
            text_part(summary),
            table_part(cells, columns),
            *(curves_part(each) for each in curves if each.values and can_draw()),
            facts_part("Errors", errors),
        ],
    )


def _row(sweep: Sweep, name: str, outcome: RunEnd | None, lines: list[Metrics]) -> dict[str, Any]:
    config = Path(sweep.runs[name].out) / CONFIG  # of what it learned by: one that had ended may have others now
    options = written_options(config) if lines and config.exists() else vars(sweep.runs[name])
    varied = {flag(each).removeprefix("--"): _text(options.get(each)) for each in sweep.varied}
    last = lines[-1] if lines else {}
    return {
        "run": name,
        **varied,
        "status": _status(Path(sweep.runs[name].out)) if outcome is None else outcome.status,
        "steps": last.get("step", 0),
        "loss": last.get("loss"),
        "eval_loss": last.get("eval_loss"),
        "seconds": math.fsum(line["seconds"] for line in lines),
    }


def _status(out: Path) -> str:
    """Of a run that has not had its turn in a sweep that was stopped."""
    return "ended" if (out / "adapter").exists() else "waiting"


def _text(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value


def _number(value: Any) -> float:
    return math.nan if value is None else value
