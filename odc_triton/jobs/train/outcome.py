"""Output of a finished run: the trained model or its adapters, a report, a trace."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...base.environment import installed
from ...base.events import Event
from ...checkpoint import save_pretrained
from ..options.options import flag
from ..reports.report import (
    Curves,
    can_draw,
    curves_part,
    facts_part,
    save_html,
    table_part,
    text_part,
    timelines_part,
)
from ..reports.trace import excerpt, save_trace
from .metrics import Metrics, in_two_lines, read_metrics
from .report_words import answers
from .run import Run

_ROWS = 12
_COLUMNS = (
    *("step", "loss", "eval_loss", "reward", "eval_reward", "eval_pass"),
    *("length", "lr", "grad_norm", "seconds", "idle"),
)
_CURVES = (
    *(("reward", "eval_reward"), ("loss", "eval_loss"), ("rewards/accuracies", "eval_rewards/accuracies")),
    *(("rewards/margins", "eval_rewards/margins"), ("length",), ("ratio", "mismatch"), ("divergence",)),
)


def gather_events(run: Run) -> list[Event]:
    """All ranks' events of the last minibatches. Collective: a barrier."""
    own = [event.as_row() for events in run.recent for event in events]
    messages = run.engine.exchange("collect the timelines", {"events": own})
    return [Event.of_row(row) for theirs in messages for row in theirs["events"]]


def save_model(run: Run, tokenizer: Any) -> Path:
    """Returns the folder written: a model for plain transformers, or adapters for plain PEFT. Only rank 0 calls it."""
    folder = run.options.model_folder
    source = run.options.tokenizer or run.options.model
    save_pretrained(run.model, folder, tokenizer, processor=source, overwrite=True)
    if run.options.chat_template is not None:
        (folder / "chat_template.json").unlink(missing_ok=True)  # of the source's processor, which would come first
    return folder


def write_report(run: Run, metrics: Sequence[Metrics], events: list[Event], summary: str) -> list[str]:
    """Writes report.html and trace.json; returns their names. Only rank 0 calls it.

    That of a run which had only to be ended, and took no step, has no timeline.
    """
    out = Path(run.options.out)
    written = ["report.html"]
    numbers = {event.minibatch for event in events}
    tracks = excerpt({"the last steps": events}, minibatches=numbers) if numbers else {}
    if tracks:
        save_trace(tracks, out / "trace.json")
        written.append("trace.json")
    else:  # it would be of other steps
        (out / "trace.json").unlink(missing_ok=True)
    draws = can_draw()
    if not draws:
        why = 'has no images, as matplotlib is not installed; run: pip install "odc-triton[plot]"'
        print(f"report.html {why}")
        summary += f"\n\nThis report {why}"
    more = dict.fromkeys(name for line in metrics for name in line if "rewards/" in name)
    columns = [name for name in (*_COLUMNS, *more) if _has(metrics, name)]
    options, usual = asdict(run.options), run.options.defaults()
    parts: tuple[dict[str, str], dict[str, str]] = {}, {}  # given, and at their defaults
    for name, value in options.items():
        if value not in (None, ()):
            parts[usual.get(name) == value][flag(name)] = typed(value)
    samples, completions = [], {}
    with contextlib.suppress(OSError, ValueError):  # the run has ended, whatever that file holds
        samples = read_metrics(out / "samples.jsonl")
    for each in [each for each in samples if "advantage" in each][-_ROWS:]:
        prompt, completion = in_two_lines(each)
        at = f"step {each['step']}, {prompt}"
        completions[at] = "\n".join(filter(None, (completions.get(at), completion.strip())))
    save_html(
        out / "report.html",
        title=f"odc-triton {run.kind}",
        parts=[
            text_part(summary),
            facts_part("", answers(run, metrics, events)),
            *(map(curves_part, _curves(metrics)) if draws else ()),
            timelines_part(tracks if draws else {}),
            table_part([[line.get(name) for name in columns] for line in _some(metrics)], columns, heading="Steps"),
            facts_part("Completions", completions),
            facts_part("Versions", versions()),
            facts_part("Options", parts[0]),
            facts_part("Options at their defaults", parts[1], folded=True),
        ],
    )
    return written


def typed(value: object) -> str:
    """As on a command line."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _has(metrics: Sequence[Metrics], name: str) -> bool:
    return any(line.get(name) is not None for line in metrics)


def _curves(metrics: Sequence[Metrics]) -> list[Curves]:
    """One image of each of `_CURVES` that has values; one of the reward functions, if there are several."""
    functions = dict.fromkeys(name for line in metrics for name in line if name.startswith("rewards/"))
    more = tuple(functions) if _has(metrics, "reward") else ()  # of pairs they are of another kind
    images = ([name for name in names if _has(metrics, name)] for names in (*_CURVES, more))
    return [
        Curves(
            title=", ".join(names),
            first=metrics[0]["step"],  # a branch begins later
            values={n: [math.nan if line.get(n) is None else line[n] for line in metrics] for n in names},
        )
        for names in images
        if names
    ]


def _some(metrics: Sequence[Metrics]) -> list[Metrics]:
    """At most a dozen lines, evenly spaced, first and last among them."""
    count = min(len(metrics), _ROWS)
    return [metrics[round(i * (len(metrics) - 1) / max(count - 1, 1))] for i in range(count)]


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | installed("odc-triton", "torch", "triton", "transformers")
