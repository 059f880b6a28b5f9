"""Trackers of a run: TensorBoard, wandb, Trackio, MLflow, SwanLab. Rank 0 logs to each, and no step waits for one.

Each tracker has a thread and a bounded queue. One that raises, or falls behind by more than its queue holds, is
reported once on stderr, and the run continues without it.

| | a resumed run | its final numbers |
| --- | --- | --- |
| TensorBoard | the steps after the checkpoint are purged from OUT/tensorboard | as text |
| wandb | the same run id, kept in OUT/wandb/run-id | the run's summary |
| Trackio | the newest run of that name | as text |
| MLflow | the same run id, kept in OUT/mlflow/run-id | the run's description |
| SwanLab | the same run id, kept in OUT/swanlab/run-id | as text |

All but TensorBoard can't overwrite a step: they keep the values that were logged first, and repeated steps are not
logged again.
"""

from __future__ import annotations

import contextlib
import importlib
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

from ...base.environment import installed
from ...base.errors import in_a_line
from ..reports.report import table
from .metrics import without_nan
from .run_options import RunOptions

END_S = 6.0  # that the end of a run waits for its trackers; `end_process` bounds their exit functions
_MOST_CALLS = 10_000  # that wait for a tracker


def require_trackers(names: Sequence[str]) -> None:
    """Raises ImportError with the remedy for a tracker whose package is not installed."""
    for name in chosen(names):
        if not _has(distribution := _KINDS[name].distribution):
            raise ImportError(f'--report-to {name} needs {distribution}; run: pip install "odc-triton[{name}]"')
    if names and not chosen(names):
        raise ImportError(
            f'--report-to all, and none of {", ".join(_KINDS)} is installed; run: pip install "odc-triton[tensorboard]"'
        )


def _has(distribution: str) -> bool:
    return installed(distribution)[distribution] != "not installed"


def chosen(names: Sequence[str]) -> list[str]:
    """The trackers of `--report-to`, each once; `all` stands for those that are installed."""
    every = [name for name, kind in _KINDS.items() if "all" in names and _has(kind.distribution)]
    return [*dict.fromkeys([*every, *(name for name in names if name != "all")])]


class Trackers:
    """The trackers of `options.report_to`. Log every step, and `close` at the end.

    `step`: resume point; `seen`: the last step that was logged before.
    """

    def __init__(self, options: RunOptions, *, ranks: int, step: int = 0, seen: int = 0) -> None:
        config = asdict(options) | {"ranks": ranks}
        self._running = [_KINDS[name](options, config, step, seen) for name in chosen(options.report_to)]

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Logs a step's metrics, those that are finite numbers."""
        self._call(metrics["step"], "log", _finite(metrics))

    def log_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs samples: lines of samples.jsonl, all of one step."""
        names = [*dict.fromkeys(name for each in samples for name in each)]  # evaluations' have no advantage
        rows = [[line.get(name) for name in names] for line in map(without_nan, samples)]
        self._call(samples[0]["step"], "log_samples", names, rows)

    def finish(self, metrics: Mapping[str, Any], words: str) -> None:
        """Logs the final numbers, and the outcome of the run as text. Only `close` may follow."""
        self._call(metrics["step"], "finish", _finite(metrics), words)

    def _call(self, *call: Any) -> None:
        for each in self._running:
            each.call(*call)

    def close(self, *, within_s: float = END_S) -> None:
        """Ends all trackers within `within_s` seconds, and reports which have not logged everything."""
        running, self._running = self._running, []
        for each in running:
            each.end()
        deadline_s = time.monotonic() + within_s
        for each in running:
            each.join(max(0.0, deadline_s - time.monotonic()), within_s)


class _Tracker:
    """A tracker with its queue of calls (step, method, arguments), and its thread, which no exit waits for.

    The thread calls `_start`, `log` and `log_samples` in the order of steps, then `finish`, or `_stop` if the run ends
    before its last step. As they stand they are for a tracker that can't overwrite a step.
    """

    name: str  # for --report-to; also the name of odc-triton's extra that installs it
    distribution: str  # as pip knows it
    module: str  # as it is imported
    variables: tuple[str, str] = ("", "")  # of the environment: the project, and the run's name, by default
    _run: Any  # what the package's `init` returned

    def __init__(self, options: RunOptions, config: dict[str, Any], step: int, seen: int) -> None:
        self._options, self._config, self._step, self._seen = options, config, step, seen
        self._out = Path(options.out).absolute()
        self.problem, self._last = "", step
        self._calls: queue.Queue[tuple | None] = queue.Queue(_MOST_CALLS)
        self._thread = threading.Thread(target=self._work, name=f"odc-{self.name}", daemon=True)
        try:
            # Not in the threads: two that import modules of a cycle may see a partially initialised one.
            self._package = importlib.import_module(self.module)
        except Exception as error:
            self._fail(in_a_line(error))
        else:
            self._thread.start()

    def _work(self) -> None:
        try:
            self._start()
            while (call := self._calls.get()) is not None and not self.problem:
                self._last, method, *args = call
                getattr(self, method)(self._last, *args)
                if method == "finish":
                    return
            self._stop()
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

    @property
    def _project(self) -> str:
        return self._options.project or os.environ.get(self.variables[0]) or "odc-triton"

    @property
    def _run_name(self) -> str:
        return self._options.run_name or os.environ.get(self.variables[1]) or self._out.name

    def _init(self, **how: Any) -> None:
        """The package's `init`; with an `id` in `how`, the one that it returns is kept."""
        how = {"group": self._options.run_group, "config": self._config} | how
        self._run = self._package.init(project=self._project, name=self._run_name, **how)
        if "id" in how:
            self._keep_id(self._run.id)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if step > self._seen:
            self._run.log(metrics, step=step)

    def log_samples(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self.log(step, {"samples": self._package.Table(columns=columns, data=rows)})

    def _stop(self) -> None:
        self._run.finish()

    def _kept_id(self) -> str | None:
        """The id that the start before has kept. None: this is another run, to which all steps are new."""
        if self._seen and (file := self._out / self.name / "run-id").exists():
            return file.read_text().strip()
        self._seen = 0
        return None

    def _keep_id(self, made: str) -> None:
        (folder := self._out / self.name).mkdir(exist_ok=True)
        (folder / "run-id").write_text(made)


class _TensorBoard(_Tracker):
    """Event files in OUT/tensorboard."""

    name = distribution = "tensorboard"
    module = "torch.utils.tensorboard"

    def _start(self) -> None:
        purged = self._step + 1 if self._seen > self._step else None
        self._writer = self._package.SummaryWriter(str(self._out / "tensorboard"), purge_step=purged, flush_secs=10)
        options = [[name, str(value)] for name, value in self._config.items()]
        self._writer.add_text("options", table(options, ["option", "value"]), self._step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._writer.add_text("samples", table(rows, columns), step)

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._writer.add_text("final", _final(metrics, words), step)
        self._stop()

    def _stop(self) -> None:
        self._writer.close()


class _WeightsAndBiases(_Tracker):
    """A run of wandb. Account, server, mode, and defaults of options come from the user's environment."""

    name = distribution = module = "wandb"
    variables = ("WANDB_PROJECT", "WANDB_NAME")

    def _start(self) -> None:
        group, folder = (os.environ.get(f"WANDB_{each}") for each in ("RUN_GROUP", "DIR"))
        how = {"group": self._options.run_group or group, "dir": folder or str(self._out), "resume": "allow"}
        self._init(id=self._kept_id(), reinit="create_new", **how)  # a run before in this process may still be ending

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._run.summary.update({**metrics, "words": words})
        self._run.finish()

    def _stop(self) -> None:
        self._run.finish(exit_code=1)


class _Trackio(_Tracker):
    """A run of Trackio, in the user's TRACKIO_DIR, or as configured in the environment."""

    name = distribution = module = "trackio"

    def _start(self) -> None:
        self._init(resume="allow" if self._seen else "never", embed=False)

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self.log(step, {"final": self._package.Markdown(_final(metrics, words))})
        self._stop()


class _MLflow(_Tracker):
    """A run of MLflow, in the store of the user's environment. MLflow has an active run for each thread."""

    name = module = "mlflow"
    distribution = "mlflow-skinny"  # mlflow needs it, and where there is a server it is enough
    variables = ("MLFLOW_EXPERIMENT_NAME", "")

    def _start(self) -> None:
        if (kept := self._kept_id()) is not None:
            self._package.start_run(kept)  # its parameters can't be changed
            return
        group, experiment = self._options.run_group, self._package.set_experiment(self._project)
        how = {"run_name": self._run_name, "tags": None if group is None else {"group": group}}
        run = self._package.start_run(experiment_id=experiment.experiment_id, **how)
        self._keep_id(run.info.run_id)
        self._package.log_params({name: value for name, value in self._config.items() if value is not None})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step > self._seen:
            self._package.log_metrics(metrics, step=step)

    def log_samples(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._package.log_text(table(rows, columns), f"samples/step-{step:08d}.md")

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._package.set_tag("mlflow.note.content", _final(metrics, words))
        self._package.end_run()

    def _stop(self) -> None:
        self._package.end_run("KILLED")


class _SwanLab(_Tracker):
    """A run of SwanLab. Account, server and mode come from the user's environment."""

    name = distribution = module = "swanlab"
    variables = ("SWANLAB_PROJ_NAME", "SWANLAB_EXP_NAME")

    def _start(self) -> None:
        how = {"log_dir": os.environ.get("SWANLAB_LOG_DIR") or str(self._out / "swanlab"), "resume": "allow"}
        self._init(id=self._kept_id(), reinit=True, **how)  # it has one run in a process: one before may not have ended

    def log_samples(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        samples = self._package.echarts.Table()
        samples.add(columns, rows)
        self.log(step, {"samples": samples})

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._run.log({"final": self._package.Text(_final(metrics, words))}, step=step)
        self._run.finish()

    def _stop(self) -> None:
        self._run.finish("aborted")


_KINDS: dict[str, type[_Tracker]] = {
    kind.name: kind for kind in (_TensorBoard, _WeightsAndBiases, _Trackio, _MLflow, _SwanLab)
}


def _final(metrics: dict[str, float], words: str) -> str:
    return f"{words}\n\n{table(list(metrics.items()), ['', 'at the end'])}"


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != "step"}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
