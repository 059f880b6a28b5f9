"""The common part of training jobs on one rank: the run's state, its optimizer, the step after a minibatch."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ...base.events import Event
from ...checkpoint.parameters import plain_elements
from ...comm.grid import Grid
from ...engine.api import engine_of
from ...packs.offload import OffloadedCheckpoints
from ...packs.reference import Teacher
from ...plan.counter import store_counter
from ...plan.queue import Counter, OwnCounter
from ...step import Objective, StepPart, StepReport, run_step
from .agreement import GradientNorm, IdleTime
from .metrics import Metrics
from .model import ties_head
from .optimizers import make_optimizer, make_schedule
from .prepare import Prepared
from .run_folder import require_same
from .run_options import RunOptions
from .stop import StopSignal

# A held-out prompt as the model went on from it: texts by name, the prompt first, whether it ended, any rewards.
Sample = dict[str, Any]
SHOWN_MINIBATCHES = 3  # in the report's timeline


@dataclass(kw_only=True)
class RunState:
    """A run's progress, the same on every rank. A checkpoint has this, the shards and each rank's random state.

    The learning rate is a function of `step`; the samples' order is a function of the sampler's seed and position.
    """

    step: int = 0  # skipped ones counted; one of GRPO has --iterations steps of the optimizer
    tokens: int = 0  # targets learned so far, all ranks
    skipped: int = 0  # steps whose loss or gradient was not finite
    repeated: int = 0  # minibatches that were run again as exact sums did not fit their scales
    best: float | None = None  # evaluation by `Run.measure`
    best_step: int = 0  # after which it was made; 0: there is none
    stale: int = 0  # evaluations since
    sampler: dict[str, Any] = field(default_factory=dict)


class TooManySkipped(RuntimeError):
    """More steps than `max_skipped` had a loss or a gradient that is not finite."""


class Run(ABC):
    """Model, optimizer and where the run stands; what it learns from is its kind's own."""

    measure: ClassVar[str] = "eval_loss"  # by which evaluations are compared
    more_is_better: ClassVar[bool] = False
    bar: ClassVar[dict[str, tuple[str, str]]]  # what the progress bar shows: metrics with their formats, by label

    def __init__(self, *, options: RunOptions, model: nn.Module, prepared: Prepared[Any]) -> None:
        """`model` is sharded, and packing was enabled before that."""
        self.options, self.model = options, model
        self.engine = engine_of(model)
        self.data, self.evaluation, self.mix = prepared.data, prepared.evaluation, prepared.mix
        self.identity = prepared.identity
        self.per_step = getattr(options, options.per_rank) * self.engine.world  # samples, prompts or pairs
        self.epoch_steps = len(self.mix) // self.per_step
        self.state = RunState()
        self.optimizer = make_optimizer(model, options)
        epochs = getattr(options, "epochs", None) or 1.0
        self.steps = options.steps or max(round(epochs * self.epoch_steps), 1)
        self._schedule = make_schedule(options, self.steps)
        self.stop_signal = StopSignal()
        self.parts: list[StepPart] = []  # of the barrier of a step, in addition to the run's
        self.stop: int | None = None  # the signal for which the ranks have agreed to stop
        self.samples: list[Sample] = []  # of the step's rollout and evaluation, the same on every rank
        self.was_skipped = False  # the last step: the weights that it left unchanged may be the cause
        self.recent: deque[list[Event]] = deque(maxlen=SHOWN_MINIBATCHES)
        self.norm = GradientNorm(model)
        self.idle = IdleTime(self.engine.events)

    @property
    def kind(self) -> str:
        """The command that starts it."""
        return f"train {self.options.job}"

    def teacher_of(self, model: nn.Module | None) -> Teacher | None:
        """`model`, sharded, as the one to learn from, if there is one. After `enable_split` of both."""
        if model is None:
            return None
        how = {name: getattr(self.options, f"teacher_{name}") for name in ("beta", "temperature", "weight")}
        return Teacher(model, self.model, **how)

    @abstractmethod
    def train_step(self) -> Metrics | None:
        """The next step; metrics of all ranks together, the same on every rank. None if it was given up, to stop.

        Afterwards `stop` is what the ranks agreed on. Raises MinibatchFailed on all ranks for what
        a microbatch raised on any; TooManySkipped.
        """

    @abstractmethod
    def evaluate(self) -> Metrics:
        """Metrics of the held-out data, the same on every rank; `samples` get those that are wanted. Collective."""

    @property
    def evaluates(self) -> bool:
        """True if there is held-out data."""
        return self.evaluation is not None

    def judge(self, metrics: Metrics) -> None:
        """Compares an evaluation with the best one. One after a skipped step, with the weights of another step, doesn't
        count.
        """
        state, value = self.state, metrics.get(self.measure)
        if value is None or self.was_skipped:
            return
        is_better = state.best is None or (value > state.best if self.more_is_better else value < state.best)
        if math.isfinite(value) and is_better:
            state.best, state.best_step, state.stale = value, state.step, 0
        else:
            state.stale += bool(self.options.early_stopping)

    @property
    def is_over(self) -> bool:
        """True after the last step, or if the evaluations have not become better for as long as the run waits."""
        return self.state.step >= self.steps or 0 < self.options.early_stopping <= self.state.stale

    @property
    def kept_step(self) -> int:
        """The step whose weights the run's model has."""
        return (self.options.keep_best and self.state.best_step) or self.state.step

    def shown(self, metrics: Metrics) -> dict[str, str]:
        """The progress bar's view of a step's metrics."""
        return {label: format(metrics[name], form) for label, (name, form) in self.bar.items() if name in metrics}

    def step(
        self,
        plan: Any,
        objective: Objective,
        *,
        collate: Callable[[Any], Any] | None = None,
        ahead: bool = False,
        parts: Sequence[StepPart] = (),
    ) -> StepReport:
        """`run_step`, and the optimizer's step if loss and gradient are finite."""
        norm, idle = self.norm, self.idle
        parts = [self.stop_signal, norm, idle, *self.parts, *parts]
        report = run_step(self.model, plan, objective, collate=collate, ahead=ahead, parts=parts)
        self.state.repeated += report.repeats
        self.was_skipped = not (math.isfinite(report.loss) and math.isfinite(norm.total))
        if not self.was_skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            norm.clip(self.options.clip_norm)
            self.optimizer.step()
        norm.clear()
        self.optimizer.zero_grad()
        self.stop = self.stop_signal.agreed
        idle.end()
        self.recent.append(idle.step)
        return report

    @property
    def lr(self) -> float:
        """The learning rate of the current step."""
        return self.options.lr * self._schedule(self.state.step)

    def stepped(self, start_s: float, tokens: int, metrics: Metrics, **parts_s: float) -> Metrics:
        """Counts the step, which began at `start_s` and learned `tokens`, and completes its `metrics`, which have the
        loss. `parts_s`: seconds of its parts. Raises TooManySkipped.
        """
        state, lr, took_s = self.state, self.lr, time.monotonic() - start_s
        state.step += 1
        state.tokens += tokens
        state.skipped += self.was_skipped
        metrics = {
            "step": state.step,
            **metrics,
            "lr": lr,
            "grad_norm": self.norm.total,
            "tokens": state.tokens,
            "target_tokens_per_s": tokens / took_s,
            "idle": self.idle.share,
            **parts_s,
            "seconds": took_s,
            "skipped": state.skipped,
        }
        if self.engine.deterministic:
            metrics["repeated"] = state.repeated
        if (offloaded := self.engine.participant(OffloadedCheckpoints)) is not None:
            metrics["offloaded_bytes"] = offloaded.sent_bytes  # of this rank
        if state.skipped > self.options.max_skipped:
            raise TooManySkipped(
                f"step {state.step}: the loss is {metrics['loss']} and the gradient's norm {metrics['grad_norm']}; "
                f"that makes {state.skipped} skipped steps, more than --max-skipped {self.options.max_skipped}. Lower "
                f"--lr, look at the data, or continue from an older checkpoint with --resume FOLDER"
            )
        return metrics

    def is_sound(self) -> bool:
        """True if the weights are worth keeping: at least one step changed them, and all are finite. Collective."""
        finite = all(bool(p.to_local().isfinite().all()) for p in self.model.parameters())
        found = self.engine.exchange(f"whether the weights are finite after step {self.state.step}", {"finite": finite})
        self.idle.restart()
        return all(each["finite"] for each in found) and self.state.skipped < self.state.step

    def in_words(self) -> str:
        """What is trained, on what, for how long."""
        options, elements = self.options, plain_elements(self.model)
        trained, total = sum(n for p, n in elements.items() if p.requires_grad), sum(elements.values())
        found = (options.checkpoint_every, "steps"), ((options.checkpoint_interval_s or 0) / 60, "minutes")
        every = " and ".join(f"every {number:g} {unit}" for number, unit in found if number) or "none"
        much = "all" if options.warmup_steps >= self.steps else f"{options.warmup_steps}"
        is_long = 3 * options.warmup_steps > self.steps
        warms = f", {much} of them warm-up (--warmup-steps is {options.warmup_steps})" * is_long
        return (
            f"{trained:,} of {total:,} parameters, ranks: {self.engine.world} ({self.engine.heap.device.type}), "
            f"{options.dtype}, steps: {self.steps}{warms}, checkpoints: {every}"
        )

    def end_in_words(self) -> str:
        """Why the run ended before its last step, and which step's model it keeps, if so."""
        state, text = self.state, ""
        if state.step < self.steps:
            text += (
                f" It ended early, before step {self.steps}: {self.measure} has not improved in {state.stale} "
                f"evaluations in a row (--early-stopping)."
            )
        if self.options.keep_best:
            which = (
                f"best, with {self.measure} {state.best:.4f}"
                if state.best_step
                else "last: of no evaluation a checkpoint is left"
            )
            text += f" The model is that of step {self.kept_step}, the {which} (--keep-best)."
        return text

    def position(self) -> dict[str, Any]:
        """All that a checkpoint needs, except shards and random states; the same on every rank; JSON."""
        about = {"identity": self.identity, "seed": self.options.seed, "ties_head": ties_head(self.model)}
        return {"state": asdict(self.state)} | about

    def resume(self, saved: dict[str, Any], where: Path) -> str:
        """Restores a `position` of the run in the folder `where`; returns the options that have changed, in words.

        Raises ValueError for another kind of run, or options that may not change.
        """
        if "state" not in saved:
            raise ValueError(f"the checkpoint has no position of a run: it was not saved by {self.kind}")
        changed = require_same(saved["identity"], self.identity, where=where)
        self.state = RunState(**saved["state"])
        return changed

    def close(self) -> None:  # noqa: B027
        """Ends what the run has started."""


def shared_counter(options: RunOptions, grid: Grid) -> Counter:
    """The shared counter of a queue, with the run's deadline."""
    if grid.world == 1:
        return OwnCounter()
    return store_counter(grid.group, timeout=timedelta(minutes=options.timeout_minutes))
