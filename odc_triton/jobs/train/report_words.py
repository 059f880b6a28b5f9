"""What a run's report says in words: the run, whether it learned, where time went, what to do next."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from shlex import quote

from ...base.events import Event
from ..options.options import flag
from ..reports.trace import idle_of_ranks, seconds_text
from .metrics import Metrics
from .prepare import CONFIG
from .run import Run

_MUCH_IDLE = 0.15  # more is worth a look at docs/slow.md
_MEASURES = (
    *("loss", "reward", "rewards/accuracies"),
    *("eval_loss", "eval_reward", "eval_pass", "eval_rewards/accuracies"),
)
_PARTS = {"rollout_s": "sampling", "scoring_s": "rewards", "update_s": "learning"}  # of a step of GRPO


def answers(run: Run, metrics: Sequence[Metrics], events: list[Event]) -> dict[str, str]:
    """Answers by question; one has lines."""
    options = run.options
    source = options.model if options.init is None else f"random weights ({options.init})"
    return {
        "The run": f"{source} on {', '.join(options.data)}: {run.in_words()}",
        "Did it learn?": _learned(run, metrics),
        "Where did time go?": _time(metrics, events),
        "What next?": _next(run, metrics),
    }


def in_words(metrics: Sequence[Metrics], *, ranks: int) -> str:
    """A run in a few sentences."""
    if not metrics:
        return "No step was taken."
    first, last = metrics[0], metrics[-1]
    name = "reward" if "reward" in first else "loss"
    went = f"went from {_number(first[name])} to {_number(last[name])}"
    if first[name] is last[name] is None:
        went = "was not finite in the first or the last step"
    on = f"{last['step']} steps over {last['tokens']:,} tokens on {ranks} rank{'s' if ranks > 1 else ''}"
    text = f"{on}: the {name} {went}. Idle: {_idle(metrics):.1%} of the time."
    if all(line.get("groups_learned") == 0 and "divergence" not in line for line in metrics):
        text += (
            " Nothing was learned: in no step did the rewards of a prompt's completions differ. Look at what the "
            "reward functions return for them, or try a higher --temperature, more --generations or easier prompts."
        )
    if last["skipped"]:
        text += f" {last['skipped']} steps were skipped because a loss or gradient was not finite."
    return text


def _number(value: float | None) -> str:
    return "no finite value" if value is None else f"{value:.4f}"


def _idle(metrics: Sequence[Metrics]) -> float:
    """The share of the steps' time in which ranks waited or did nothing."""
    total_s = sum(line["seconds"] for line in metrics)
    return sum(line["idle"] * line["seconds"] for line in metrics) / total_s if total_s else 0.0


def _learned(run: Run, metrics: Sequence[Metrics]) -> str:
    """Means of the first and the last quarter of the steps, as single steps differ by their samples."""
    lines = []
    for name in _MEASURES:
        seen = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
        if not seen or (name == "loss" and "reward" in metrics[0]):  # GRPO's is no measure
            continue
        values = [value for _, value in seen]
        part = 1 if name.startswith("eval_") else max(len(values) // 4, 1)
        first, last = statistics.fmean(values[:part]), statistics.fmean(values[-part:])
        of = "" if part == 1 else f" (means of the first and last {part} steps)"
        text = f"{name}: {first:.4f} → {last:.4f}{of}" if len(values) > 1 else f"{name}: {last:.4f}"
        if name == run.measure and len(values) > 1:
            step, best = (max if run.more_is_better else min)(seen, key=lambda each: each[1])
            text += f", best {best:.4f} after step {step}"
            if values[-1] != best and not run.options.keep_best:
                text += ": it got worse since; `--keep-best` writes the best model, `--early-stopping 3` ends such runs"
        lines.append(text)
    return "\n".join(lines) or "no step was taken"


def _time(metrics: Sequence[Metrics], events: list[Event]) -> str:
    if not metrics:
        return "no step was taken"
    seconds, idle = [line["seconds"] for line in metrics], _idle(metrics)
    total_s = sum(seconds)
    lines = [
        f"{seconds_text(total_s)} in {len(seconds)} steps, without evaluation and checkpoints; a step took "
        f"{seconds_text(statistics.median(seconds))} (median), the slowest {seconds_text(max(seconds))}",
        f"ranks waited or did nothing in {idle:.1%} of the time: without that, steps would be at most "
        f"{1 / max(1 - idle, 0.01):.2f} times as fast",
    ]
    if len(of_ranks := idle_of_ranks(events) if events else {}) > 1:
        most, least = max(of_ranks, key=of_ranks.__getitem__), min(of_ranks, key=of_ranks.__getitem__)
        lines.append(
            f"in the timeline (last steps, with evaluations) rank {most} was idle most ({of_ranks[most]:.1%}) and rank "
            f"{least} least ({of_ranks[least]:.1%})"
        )
    parts = {what: sum(line.get(name, 0.0) for line in metrics) for name, what in _PARTS.items()}
    if total_s and any(parts.values()):
        shares = ", ".join(f"{what} {part_s / total_s:.0%}" for what, part_s in parts.items())
        lines.append(f"{shares} of the time{', partly at once' * (sum(parts.values()) > 1.05 * total_s)}")
    return "\n".join(lines)


def _next(run: Run, metrics: Sequence[Metrics]) -> str:
    options = run.options
    command = f"odc-triton {run.kind} --config {quote(f'{options.out}/{CONFIG}')} --resume auto"
    if options.lora_rank:
        export = f"odc-triton export {quote(options.out)} --merge --out FOLDER"
        lines = [f"use adapter/ with PEFT; one model of both: `{export}`"]
    else:
        lines = [f"use model/ with transformers, vLLM and others: `from_pretrained({f'{options.out}/model'!r})`"]
    ended_early = run.state.step < run.steps
    more = f"--early-stopping {2 * options.early_stopping}" if ended_early else f"--steps {2 * run.steps}"
    lines.append(f"train it further: `{command} {more}`")
    if options.warmup_steps >= run.steps:
        lines.append(
            f"all steps were warm-up, so the learning rate never reached {options.lr:g}: lower `--warmup-steps`"
        )
    if not run.evaluates:
        lines.append("whether it learned more than these samples, `--eval-data FILE` tells")
    if _idle(metrics) > _MUCH_IDLE:
        lines.append(f"much idle time: docs/slow.md says why; a larger `{flag(options.per_rank)}` often helps")
    return "\n".join(lines)
