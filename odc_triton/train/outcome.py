"""Output of a finished run: the trained model or its adapters, a report, a trace."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.events import Event
from ..base.options import flag
from ..base.report import Curves, Texts, can_draw, installed, save_html, save_timeline
from ..base.trace import excerpt, save_trace
from ..checkpoint import save_pretrained
from .metrics import Metrics, read_metrics
from .run import Run
from .run_options import RunOptions

_ROWS = 12


def gather_events(run: Run) -> list[Event]:
    """All ranks' events of the last minibatches. Collective: a barrier."""
    own = [event.as_row() for events in run.recent for event in events]
    messages = run.engine.exchange("collect the timelines", {"events": own})
    return [Event.of_row(row) for theirs in messages for row in theirs["events"]]


def save_model(run: Run, out: Path, tokenizer: Any) -> Path:
    """Returns the folder written: a model for plain transformers, or adapters for plain PEFT. Only rank 0 calls it."""
    folder = out / ("adapter" if run.options.lora_rank else "model")
    source = run.options.tokenizer or run.options.model
    save_pretrained(run.model, folder, tokenizer, processor=source, overwrite=True)
    return folder


def write_report(out: Path, job: type[Run], options: RunOptions, events: list[Event], *, ranks: int) -> list[str]:
    """Writes report.html, trace.json and, with matplotlib, timeline.png; returns their names. Only rank 0 calls it.

    If a finished run was started again and took no step, an existing report stays; a new one has no timeline.
    """
    if all(event.kind != "step" for event in events) and (out / "report.html").exists():
        return []
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
    summary = in_words(job, metrics, ranks=ranks)
    if not draws:
        why = 'has no pictures, as matplotlib is not installed; run: pip install "odc-triton[plot]"'
        print(f"report.html {why}")
        summary += f"\n\nThis report {why}"
    save_html(
        out / "report.html",
        title=job.title,
        summary=summary,
        rows=[[_cell(name, line.get(name)) for name in job.columns] for line in _some(metrics)],
        columns=list(job.columns.values()),
        tracks=tracks if draws else {},
        curves=_curves(job, metrics) if draws else [],
        texts=_last_samples(out),
        facts=_versions() | {flag(n): _fact(v) for n, v in asdict(options).items() if v not in (None, ())},
    )
    return written


def _last_samples(out: Path) -> Texts | None:
    """The samples of the last evaluation."""
    samples = read_metrics(out / "samples.jsonl")
    if not samples:
        return None
    step = samples[-1]["step"]
    last = [line for line in samples if line["step"] == step]
    columns = [name for name in last[0] if name != "step"]
    return Texts(
        title=f"Held-out prompts, completed after step {step}",
        columns=columns,
        rows=[[line.get(name) for name in columns] for line in last],
    )


def _fact(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _curves(job: type[Run], metrics: list[Metrics]) -> list[Curves]:
    """The run's pictures that have values."""
    found = []
    for picture in job.pictures:
        values = {
            words: [math.nan if line.get(name) is None else line[name] for line in metrics]
            for name, words in picture.values.items()
            if any(line.get(name) is not None for line in metrics)
        }
        if values:
            found.append(Curves(title=picture.title, label=picture.label, values=values))
    return found


def in_words(job: type[Run], metrics: list[Metrics], *, ranks: int) -> str:
    """A run in a few sentences."""
    if not metrics:
        return "No step was taken."
    first, last = metrics[0], metrics[-1]
    seconds = sum(line["seconds"] for line in metrics)
    idle = sum(line["idle"] * line["seconds"] for line in metrics) / seconds if seconds else 0.0
    name, words = job.goal if job.goal[0] in first else ("loss", "the loss")
    text = (
        f"{last['step']} steps over {last['tokens']:,} {job.tokens} on {ranks} rank{'s' if ranks > 1 else ''}: {words} "
        f"went from {_number(first[name])} to {_number(last[name])}. {'They were' if ranks > 1 else 'It was'} idle "
        f"{idle:.1%} of the time."
    )
    if last["skipped"]:
        text += f" {last['skipped']} steps were skipped because a loss or gradient was not finite."
    return text


def _number(value: float | None) -> str:
    return "no finite value" if value is None else f"{value:.4f}"


def _some(metrics: list[Metrics]) -> list[Metrics]:
    """At most a dozen lines, evenly spaced, first and last among them; only evaluated ones, if there are two."""
    evaluated = [line for line in metrics if any(name.startswith("eval_") for name in line)]
    metrics = evaluated if len(evaluated) > 1 else metrics
    if len(metrics) <= _ROWS:
        return metrics
    return [metrics[round(i * (len(metrics) - 1) / (_ROWS - 1))] for i in range(_ROWS)]


def _cell(name: str, value: Any) -> Any:
    return f"{value:.1%}" if name == "idle" and value is not None else value


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | installed("odc-triton", "torch", "triton", "transformers")
