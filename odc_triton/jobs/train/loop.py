"""The steps of a training run and what happens between them: evaluation, metrics, checkpoints, stops, the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ...base.errors import CheckpointCorrupt, CheckpointFailed, MinibatchFailed, OdcError, RolloutFailed
from ...base.events import Event
from ..checkpoints.background import BackgroundCheckpoints
from ..checkpoints.steps import Checkpoints
from ..launcher.launch import Interrupted
from .metrics import Metrics, MetricsFile, Progress, in_two_lines, read_metrics
from .model_card import write_card
from .outcome import gather_events, save_model, write_report
from .prepare import Prepared
from .report_words import in_words
from .run import Run, Sample, TooManySkipped
from .save_clock import SaveClock
from .stop import StopSignal
from .trackers import Trackers

OnMetrics = Callable[[Metrics], None]
ON_ALL_RANKS = (MinibatchFailed, RolloutFailed, TooManySkipped)


class Records:
    """Rank 0's records of the steps: metrics.jsonl, samples.jsonl, and what trackers and `on_metrics` get."""

    def __init__(self, run: Run, on_metrics: OnMetrics | None) -> None:
        options, step = run.options, run.state.step
        self._on_metrics = on_metrics
        self._metrics = MetricsFile(Path(options.out) / "metrics.jsonl", step=step)
        self._samples: MetricsFile | None = None
        self.trackers = Trackers(options, ranks=run.engine.world, step=step, seen=self._metrics.seen)

    def write(self, metrics: Metrics, samples: list[Sample]) -> None:
        """A step's metrics, and samples of its rollout and its evaluation, if there are any. Raises OSError."""
        self._metrics.write(metrics)
        self.trackers.log(metrics)
        lines = [{"step": metrics["step"], **each} for each in samples]
        if lines:
            if self._samples is None:
                self._samples = MetricsFile(self._metrics.path.with_name("samples.jsonl"), step=metrics["step"] - 1)
            for line in lines:
                self._samples.write(line)
            self.trackers.log_samples(lines)
        if self._on_metrics is not None:
            self._on_metrics(metrics)

    def close(self) -> None:
        self.trackers.close()
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()


class Loop:
    """The steps of a run, and what happens between them."""

    def __init__(
        self, run: Run, prepared: Prepared, stop: StopSignal, on_metrics: OnMetrics | None, *, is_shown: bool = True
    ) -> None:
        """`is_shown`: rank 0 shows a progress bar."""
        self.run, self.prepared, self.on_metrics = run, prepared, on_metrics
        self.out = Path(run.options.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints", keep=run.options.keep, rank=run.engine.rank)
        self.saved_step = -1
        self._evaluation_s = 0.0  # what the last one took
        self._is_first, self._is_shown = run.engine.rank == 0, is_shown
        self._records: Records | None = None
        # By default only where ranks compute on GPUs: on the CPU the writer takes a core from a rank's step.
        wanted = run.options.checkpoint_background
        self._in_background = run.engine.heap.device.type == "cuda" if wanted is None else wanted
        self.background = BackgroundCheckpoints(self.checkpoints, model=run.model)
        run.stop_signal = stop
        run.parts.append(self.background)

    def run_to_the_end(self) -> Metrics:
        try:
            return self._run_to_the_end()
        except ON_ALL_RANKS:  # so the last checkpoint can still be completed
            try:
                self.background.wait()
            except OdcError as problem:
                print(f"the last checkpoint failed too: {problem}", file=sys.stderr, flush=True)
            raise
        finally:
            self.background.close()

    def _run_to_the_end(self) -> Metrics:
        run = self.run
        self._resume()
        metrics: Metrics = {"step": run.state.step, "tokens": run.state.tokens}
        if run.is_over and min(run.steps, run.state.step) <= self.prepared.ended_step:
            if self._is_first:
                self.prepared.folder.end(self.prepared.ended_step)  # for these options too
            return metrics
        self.clock = SaveClock(run.options.checkpoint_interval_s)
        run.parts.append(self.clock)
        unsaved: CheckpointFailed | None = None
        if self._is_first:
            self._records = Records(run, self.on_metrics)
            print(run.in_words(), flush=True)
        with Progress(total=run.steps, done=run.state.step, shown=self._is_first and self._is_shown) as progress:
            while not run.is_over and run.stop is None:
                self.clock.ahead_s, run.samples = self._evaluations_s(), []
                made = run.train_step()
                if made is None:
                    self._save_where_due()
                    break
                metrics = made
                if self._evaluates(run.state.step):
                    begun_s = time.monotonic()
                    with torch.compiler.set_stance("force_eager"):  # else it recompiles, for the other mode
                        metrics |= run.evaluate()
                    run.judge(metrics)
                    self._evaluation_s = time.monotonic() - begun_s
                if self._records is not None:
                    self._records.write(metrics, run.samples)
                progress.show(
                    run.shown(metrics),
                    [line for each in run.samples if "advantage" in each for line in in_two_lines(each)],
                )
                try:
                    self._save_where_due()
                except CheckpointFailed as error:
                    if not run.is_over:
                        raise
                    unsaved = error  # the model may still be written
                self.clock.restart()
        self.background.wait()
        if run.stop is not None and not run.is_over:
            if self._is_first:
                saved = f"saved in {self.checkpoints.folder / f'step-{run.state.step:08d}'}"
                if self.saved_step != run.state.step:
                    saved = "not saved, because its weights are not finite or unchanged"
                print(f"stopped after step {run.state.step} of {run.steps}, {saved}; continue with --resume auto")
            raise Interrupted(run.stop)
        if run.was_skipped and not run.is_sound():
            raise TooManySkipped(
                f"no model is written: {run.state.skipped} of {run.state.step} steps were skipped, and the weights are "
                f"not finite or unchanged. Lower --lr, look at the data, or continue from an older checkpoint"
            )
        self._finish(metrics, is_saved=unsaved is None)
        if unsaved is not None:
            raise unsaved
        return metrics

    def close(self) -> None:
        """Ends what this rank has started, however the run ended. Waits for no rank."""
        if self._records is not None:
            self._records.close()

    def _resume(self) -> None:
        run, path, are_damaged = self.run, None, False
        if self._is_first and self.prepared.resumes:
            with run.engine.barrier.working():  # it reads all of a checkpoint
                newest = self.checkpoints.newest(fallback=True)
            path, are_damaged = None if newest is None else str(newest), newest is None and self.checkpoints.any_folder
        found = run.engine.exchange("find the checkpoint", {"path": path, "are_damaged": are_damaged})[0]
        if found["are_damaged"]:
            raise CheckpointCorrupt(
                f"no checkpoint in {self.checkpoints.folder} is whole, and starting again would replace what the run "
                f"has: give another --out"
            )
        if (path := found["path"]) is None:
            if self._is_first and self.prepared.resumes:
                print(f"there is no checkpoint in {self.checkpoints.folder}: starting again", flush=True)
            return
        chosen = [group["weight_decay"] for group in run.optimizer.param_groups]
        saved = self.checkpoints.load(path, model=run.model, optimizer=run.optimizer)
        for group, weight_decay in zip(run.optimizer.param_groups, chosen, strict=True):
            group["weight_decay"] = weight_decay  # else the checkpoint's
        changed = run.resume(saved, where=Path(self.prepared.branch or path).absolute().parent.parent)
        self.saved_step = run.state.step
        run.idle.restart()
        state = run.state
        if run.options.keep_best and state.best_step and not self._best.is_dir():
            if self._is_first:  # of a run without --keep-best, or in the folder that this one goes on from
                print(f"{self._best} is gone: the best of the later evaluations will be kept", flush=True)
            state.best, state.best_step = None, 0
        if self._is_first:
            if changed:
                print(f"changed for the steps to come: {changed}", flush=True)
            if not run.is_over:
                print(f"continuing after step {state.step} of {run.steps}, from {path}", flush=True)
            else:
                early = (
                    f"the run ended early (--early-stopping is {run.options.early_stopping}), after step {state.step}"
                )
                done = early if state.step < run.steps else f"all {run.steps} steps are done already"
                print(f"{done}, in {path}", flush=True)

    @property
    def _best(self) -> Path:
        """The checkpoint of the best evaluation."""
        return self.checkpoints.path_of(self.run.state.best_step)

    def _evaluates(self, step: int) -> bool:
        run, every = self.run, self.run.options.eval_every
        if not run.evaluates or step == run.steps:
            return run.evaluates
        counts = run.options.keep_best or run.options.early_stopping  # else it would be missing after the resume
        return (run.stop is None or bool(counts)) and every > 0 and step % every == 0

    def _evaluations_s(self) -> float:
        """Of this step and the next, by the last one's: before the next checkpoint can be saved, if not now."""
        return self._evaluation_s * sum(self._evaluates(self.run.state.step + more) for more in (1, 2))

    def _save_where_due(self) -> None:
        """Saves by the clock or every so many steps, the best so far, at the end, and when the run is stopped.

        A step may have been skipped because of the weights themselves. So after a skipped step only the end or a stop
        saves, and only sound weights, and no older checkpoint is removed.
        """
        run, options = self.run, self.run.options
        if run.state.step == self.saved_step:  # a rollout was abandoned
            return
        if self.background.is_idle:
            self.clock.end()
        due = self.clock.is_due or (options.checkpoint_every > 0 and run.state.step % options.checkpoint_every == 0)
        last = options.saves and run.is_over
        stops = run.stop is not None and not run.is_over
        is_best = options.keep_best and run.state.best_step == run.state.step
        if run.was_skipped:
            if (last or stops) and run.is_sound():
                self._save(prune=False, ends=True)
        elif due or last or stops or is_best:
            self._save(prune=True, ends=last or stops)

    def _save(self, *, prune: bool, ends: bool) -> None:
        """`ends`: last save of the run; written synchronously."""
        run = self.run
        step = run.state.step
        how = {"optimizer": run.optimizer, "state": run.position(), "step": step, "prune": prune}
        self.clock.begin()
        self.background.wait(quiet_s=0.0)  # what it saves may still need the former best one
        if run.options.keep_best and run.state.best_step:
            self.checkpoints.best = self._best
        if self._in_background and not ends:
            self.background.save(**how)
        else:
            self.checkpoints.save(model=run.model, **how)
            self.clock.end()
        self.saved_step = step
        run.idle.restart()

    def _finish(self, metrics: Metrics, *, is_saved: bool) -> None:
        run = self.run
        events = gather_events(run)
        if run.options.keep_best and run.state.best_step not in (0, run.state.step):
            try:
                self.checkpoints.load(self._best, model=run.model, optimizer=None)
            except CheckpointCorrupt as error:
                raise CheckpointCorrupt(
                    f"{error} Without --keep-best the same command writes the last step's model"
                ) from error
        if self._records is not None:
            with run.engine.barrier.working():  # it reads the others' shards, for any time
                self._write_all(self._records.trackers, metrics, events, is_saved=is_saved)
        run.engine.exchange("the trained model is written", {})

    def _write_all(self, trackers: Trackers, metrics: Metrics, events: list[Event], *, is_saved: bool) -> None:
        run = self.run
        lines = read_metrics(self.out / "metrics.jsonl")
        summary = in_words(lines, ranks=run.engine.world) + run.end_in_words()
        trackers.finish(metrics, summary)  # they take it while the model is written
        folder = save_model(run, self.prepared.tokenizer)
        write_card(folder, run.identity, [line for line in lines if line["step"] <= run.kept_step])
        written = write_report(run, lines, events, summary)
        trackers.close()
        written = ", ".join([*written, "metrics.jsonl"])
        if is_saved:
            self.prepared.folder.end(run.state.step)
        print(f"{summary}\n{written} and {folder.name}/ are in {self.out}")
