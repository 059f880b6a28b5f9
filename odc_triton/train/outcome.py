"""What a finished run writes: the trained model or its adapters, a report, a trace."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.events import Event
from ..base.report import can_draw, installed, save_html, save_timeline
from ..base.trace import excerpt, save_trace
from ..checkpoint import save_pretrained
from .metrics import Metrics, read_metrics
from .run import SftRun
from .sft_options import SftOptions

COLUMNS = {
    "step": "step",
    "loss": "loss",
    "eval_loss": "evaluation",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "target_tokens_per_s": "targets per s",
    "idle": "idle",
}
_ROWS = 12


def gather_events(run: SftRun) -> list[Event]:
    """All ranks' events of the last minibatches. Collective: a meeting."""
    own = [event.as_row() for events in run.recent for event in events]
    messages = run.engine.meet("collect the timelines", {"events": own})
    return [Event.of_row(row) for theirs in messages for row in theirs["events"]]


def save_model(run: SftRun, out: Path, tokenizer: Any) -> Path:
    """Returns the folder written: a model for plain transformers, or adapters for plain PEFT. Only rank 0 calls it."""
    folder = out / ("adapter" if run.options.lora_rank else "model")
    save_pretrained(run.model, folder, tokenizer, overwrite=True)
    return folder


def write_report(out: Path, options: SftOptions, events: list[Event], *, ranks: int) -> list[str]:
    """Writes report.html, trace.json and, with matplotlib, timeline.png; returns their names."""
    metrics = read_metrics(out / "metrics.jsonl")
    numbers = {event.minibatch for event in events}
    tracks = excerpt({"the last minibatches": events}, minibatches=numbers) if numbers else {}
    draws = can_draw()
    written = ["report.html"]
    if tracks:
        save_trace(tracks, out / "trace.json")
        written.append("trace.json")
    if tracks and draws:
        save_timeline(tracks, out / "timeline.png")
        written.append("timeline.png")
    summary = in_words(metrics, ranks=ranks)
    if not draws:
        why = 'has no pictures, as matplotlib is not installed; run: pip install "odc-triton[plot]"'
        print(f"report.html {why}")
        summary += f"\n\nThis report {why}"
    losses = {"training": [line["loss"] for line in metrics if line["loss"] is not None]}
    save_html(
        out / "report.html",
        title="Supervised fine-tuning",
        summary=summary,
        rows=[[_cell(name, line.get(name)) for name in COLUMNS] for line in _some(metrics)],
        columns=list(COLUMNS.values()),
        tracks=tracks if draws else {},
        losses=losses if draws and losses["training"] else {},
        facts=_versions() | {name: str(value) for name, value in asdict(options).items() if value is not None},
    )
    return written


def in_words(metrics: list[Metrics], *, ranks: int) -> str:
    """A run in two sentences."""
    if not metrics:
        return "No step was taken."
    first, last = metrics[0], metrics[-1]
    seconds = sum(line["seconds"] for line in metrics)
    idle = sum(line["idle"] * line["seconds"] for line in metrics) / seconds if seconds else 0.0
    text = (
        f"{last['step']} steps over {last['tokens']:,} target tokens on {ranks} rank{'s' if ranks > 1 else ''}: the "
        f"loss went from {_number(first['loss'])} to {_number(last['loss'])}. {'They were' if ranks > 1 else 'It was'} "
        f"idle {idle:.1%} of the time."
    )
    if last["skipped"]:
        text += f" {last['skipped']} steps were skipped because a loss or gradient was not finite."
    return text


def _number(value: float | None) -> str:
    return "no finite value" if value is None else f"{value:.4f}"


def _some(metrics: list[Metrics]) -> list[Metrics]:
    """At most a dozen lines, evenly spaced, first and last among them."""
    if len(metrics) <= _ROWS:
        return metrics
    return [metrics[round(i * (len(metrics) - 1) / (_ROWS - 1))] for i in range(_ROWS)]


def _cell(name: str, value: Any) -> Any:
    return f"{value:.1%}" if name == "idle" and value is not None else value


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | installed("odc-triton", "torch", "triton", "transformers")
