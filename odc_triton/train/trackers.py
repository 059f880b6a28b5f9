"""Trackers of a run: TensorBoard, Weights & Biases, Trackio. Rank 0 logs to each, and no step waits for one.

Each tracker has a thread and a bounded queue. One that raises, or falls behind by more than its queue holds, is
reported once on stderr, and the run continues without it.

| | a resumed run | its final numbers |
| --- | --- | --- |
| TensorBoard | the steps after the checkpoint are purged from OUT/tensorboard | as text |
| wandb | the same run id, kept in OUT/wandb/run-id | the run's summary |
| Trackio | the newest run of that name | as text |

Neither wandb's server nor Trackio can overwrite a step: they keep the values that were logged first, and repeated
steps are not logged again. Offline, wandb writes a folder for each start, and syncing one replaces the ones synced
before. So there the earlier steps are logged again, and the newest folder has the whole run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.errors import in_a_line
from ..base.report import table
from .metrics import read_metrics, without_nan
from .run_options import RunOptions

END_S = 6.0  # that the end of a run waits for its trackers; `end_process` bounds their exit functions
_MOST_CALLS = 10_000  # that wait for a tracker


def require_trackers(names: Sequence[str]) -> None:
    """Raises ImportError with the remedy for a tracker whose package is not installed."""
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f'--report-to {name} needs {name}; run: pip install "odc-triton[{name}]"') from None


class Trackers:
    """The trackers of `options.report_to`. Log every step, and `close` at the end.

    `step`: resume point; `seen`: the last step that was logged before.
    """

    def __init__(self, options: RunOptions, *, ranks: int, step: int = 0, seen: int = 0) -> None:
        start = {
            "project": options.project,
            "name": options.run_name,
            "config": asdict(options) | {"ranks": ranks},
            "out": str(Path(options.out).absolute()),
            "step": step,
            "seen": seen,
        }
        self._running = [_Tracker(name, start) for name in options.report_to]

    def __bool__(self) -> bool:
        return bool(self._running)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Logs a step's metrics, those that are finite numbers."""
        self._call(metrics["step"], "log", _finite(metrics))

    def log_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs an evaluation's samples: lines of samples.jsonl, all of one step."""
        self._call(samples[0]["step"], "log_samples", [without_nan(each) for each in samples])

    def finish(self, metrics: Mapping[str, Any], words: str) -> None:
        """Logs the final numbers, and the outcome of the run as text. Only `close` may follow."""
        self._call(metrics["step"], "finish", _finite(metrics), words)

    def _call(self, step: int, method: str, *args: Any) -> None:
        for each in self._running:
            each.call(step, method, *args)

    def close(self, *, within_s: float = END_S) -> None:
        """Ends all trackers within `within_s` seconds, and reports which have not logged everything."""
        running, self._running = self._running, []
        for each in running:
            each.end()
        deadline_s = time.monotonic() + within_s
        for each in running:
            each.join(max(0.0, deadline_s - time.monotonic()), within_s)


class _Tracker:
    """One tracker, its queue of calls (step, method, arguments), and its thread, which no exit waits for."""

    def __init__(self, name: str, start: dict[str, Any]) -> None:
        self.name, self.problem = name, ""
        self._last, self._calls = start["step"], queue.Queue(_MOST_CALLS)
        self._thread = threading.Thread(target=self._run, args=(start,), name=f"odc-{name}", daemon=True)
        try:
            # Not in the threads: two that import modules of a cycle may see a partially initialised one.
            importlib.import_module(_MODULES[name])
        except Exception as error:
            self._fail(in_a_line(error))
        else:
            self._thread.start()

    def _run(self, start: dict[str, Any]) -> None:
        try:
            tracker = _KINDS[self.name](**start)
            while (call := self._calls.get()) is not None and not self.problem:
                self._last, method, *args = call
                getattr(tracker, method)(self._last, *args)
                if method == "finish":
                    return
            tracker.stop()
        except BaseException as error:  # a package may call sys.exit
            self._fail(in_a_line(error))

    def _fail(self, problem: str) -> None:
        self.problem = problem
        message = f"{self.name} is off since step {self._last}, and the run continues without it: {problem}"
        print(f"odc-triton: {message}", file=sys.stderr, flush=True)

    def call(self, *call: Any) -> None:
        if not self.problem:
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self._fail(f"it is slower than the run, and {_MOST_CALLS} calls wait for it")

    def end(self) -> None:
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def join(self, timeout_s: float, waited_s: float) -> None:
        """Waits until everything is logged, and reports a tracker that has not logged all steps."""
        if not self.problem:
            self._thread.join(timeout_s)
        if self.problem:
            print(f"{self.name} was off since step {self._last}; metrics.jsonl has all steps: {self.problem}")
        elif self._thread.is_alive():
            message = f"{self.name} had not logged all steps {waited_s:g} s after the end; metrics.jsonl has them"
            print(f"odc-triton: {message}", file=sys.stderr)


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != "step"}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


# Each kind has the methods of `Trackers`, called in a thread: `log` and `log_samples` in the order of steps, then
# `finish`, or `stop` if the run ends before its last step.


class _TensorBoard:
    """Event files in OUT/tensorboard."""

    def __init__(self, *, config: dict[str, Any], out: str, step: int, seen: int, **_: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = step + 1 if seen > step else None
        self._writer = SummaryWriter(os.path.join(out, "tensorboard"), purge_step=purged, flush_secs=10)
        options = table([[name, str(value)] for name, value in config.items()], ["option", "value"])
        self._writer.add_text("options", options, step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._writer.add_text("samples", table([list(each.values()) for each in samples], list(samples[0])), step)

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._writer.add_text("final", _final(metrics, words), step)
        self.stop()

    def stop(self) -> None:
        self._writer.close()


class _OfSteps:
    """A tracker that can't overwrite a step: it has those up to `_seen`."""

    _run: Any
    _seen: int
    _package: Any

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if step > self._seen:
            self._run.log(metrics, step=step)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        rows = [list(each.values()) for each in samples]
        self.log(step, {"samples": self._package.Table(columns=list(samples[0]), data=rows)})


class _WeightsAndBiases(_OfSteps):
    """A run of wandb. Account, server, mode, and defaults of options come from the user's environment."""

    def __init__(
        self, *, project: str | None, name: str | None, config: dict[str, Any], out: str, step: int, seen: int
    ) -> None:
        import wandb

        id_file = Path(out, "wandb", "run-id")
        resumes = seen > 0 and id_file.exists()
        self._run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or "odc-triton",
            name=name or os.environ.get("WANDB_NAME") or Path(out).name,
            id=id_file.read_text().strip() if resumes else None,
            config=config,
            dir=os.environ.get("WANDB_DIR") or out,
            resume="allow",
        )
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(self._run.id)
        self._package = wandb
        self._seen = seen if resumes and not self._run.offline else 0
        if self._run.offline and resumes:
            for line in read_metrics(Path(out, "metrics.jsonl")):
                if line["step"] <= step:
                    self.log(line.pop("step"), {key: value for key, value in line.items() if value is not None})

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._run.summary.update({**metrics, "words": words})
        self._run.finish()

    def stop(self) -> None:
        self._run.finish(exit_code=1)


class _Trackio(_OfSteps):
    """A run of Trackio, in the user's TRACKIO_DIR, or as configured in the environment."""

    def __init__(
        self, *, project: str | None, name: str | None, config: dict[str, Any], out: str, seen: int, **_: Any
    ) -> None:
        import trackio

        self._package, self._seen = trackio, seen
        self._run = trackio.init(
            project=project or "odc-triton",
            name=name or Path(out).name,
            config=config,
            resume="allow" if seen else "never",
            embed=False,
        )

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self.log(step, {"final": self._package.Markdown(_final(metrics, words))})
        self.stop()

    def stop(self) -> None:
        self._run.finish()


_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
_KINDS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases, "trackio": _Trackio}


def _final(metrics: dict[str, float], words: str) -> str:
    return f"{words}\n\n{table(list(metrics.items()), ['', 'at the end'])}"
