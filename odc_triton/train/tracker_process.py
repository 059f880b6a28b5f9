"""What runs in a tracker's process: it reads what rank 0 tells, and gives it to the tracker's package.

| | a run that goes on | its final numbers |
| --- | --- | --- |
| TensorBoard | the steps after the checkpoint are purged from OUT/tensorboard | as text |
| wandb | the same run id, kept in OUT/wandb/run-id | the run's summary |
| Trackio | the newest run of that name | as text |

Neither wandb's server nor Trackio can take a step back: they keep what they were told first, and steps that are taken
again are not told again. Offline, wandb writes a folder for each start, and syncing one replaces what was synced
before. So there the earlier steps are told again, and the newest folder has the whole run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Protocol

from ..base.report import table
from ..base.signals import STOPS
from ..comm.launch import die_with_parent
from .metrics import read_metrics

_MOST_CHARACTERS = 500  # of an error


def serve(descriptor: int, parent_pid: int) -> None:
    """Reads lines of JSON until the final one or the end; an error's text is sent back, and ends the process.

    Ends the process with status 0 or 1.
    """
    die_with_parent(parent_pid)
    for number in STOPS:  # the rank's to obey: it tells how the run ends
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    try:
        lines = channel.makefile("rb")
        _follow(lines)
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        channel.sendall(text[:_MOST_CHARACTERS].encode())
        os._exit(1)


def _follow(lines: Any) -> None:
    tracker: Tracker | None = None
    for line in lines:
        message = json.loads(line)
        if tracker is None:
            tracker = TRACKERS[message.pop("tracker")](**message)
        elif "metrics" in message:
            tracker.log(message["step"], message["metrics"])
        elif "samples" in message:
            tracker.log_samples(message["step"], message["samples"])
        else:
            tracker.finish(message["step"], message["final"], message["words"])
            return
    if tracker is not None:
        tracker.stop()


class Tracker(Protocol):
    """One package. `step`: after which the run goes on, 0 for a new one; it had taken steps up to `seen` before.
    `project` and `name`: as the user gave them.
    """

    def __init__(
        self, *, project: str | None, name: str | None, config: dict[str, Any], out: str, step: int, seen: int
    ) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """A step's metrics. Steps come in order."""

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """An evaluation's samples, with the same columns."""

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        """The final numbers; nothing follows."""

    def stop(self) -> None:
        """The run ends before its last step."""


class TensorBoard:
    """Event files in OUT/tensorboard, by TensorBoard's own writer, which needs neither torch nor TensorFlow."""

    def __init__(
        self, *, project: str | None, name: str | None, config: dict[str, Any], out: str, step: int, seen: int
    ) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries, self._tensors, self._shapes = (
            event_pb2,
            summary_pb2,
            tensor_pb2,
            tensor_shape_pb2,
        )
        self._writer = EventFileWriter(os.path.join(out, "tensorboard"), flush_secs=10)
        if seen > step:  # readers drop what earlier files have from this step on
            status = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=step + 1, session_log=status)
        self._text("options", step, _options(config))

    def _add(self, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), **content))

    def _text(self, tag: str, step: int, text: str) -> None:
        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        value = {"tag": tag, "metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": tensor}
        self._add(step=step, summary=self._summaries.Summary(value=[value]))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in metrics.items()]
        self._add(step=step, summary=self._summaries.Summary(value=values))

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._text("samples", step, table([list(each.values()) for each in samples], list(samples[0])))

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._text("final", step, _final(metrics, words))
        self.stop()

    def stop(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb. The user's environment decides on account, server, mode, and on what the options leave open."""

    def __init__(
        self, *, project: str | None, name: str | None, config: dict[str, Any], out: str, step: int, seen: int
    ) -> None:
        import wandb

        id_file = Path(out, "wandb", "run-id")
        goes_on = seen > 0 and id_file.exists()
        self._run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or "odc-triton",
            name=name or os.environ.get("WANDB_NAME") or Path(out).name,
            id=id_file.read_text().strip() if goes_on else None,
            config=config,
            dir=os.environ.get("WANDB_DIR") or out,
            resume="allow",
        )
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(self._run.id)
        self._table = wandb.Table
        self._seen = seen if goes_on and not self._run.offline else 0
        if self._run.offline and goes_on:
            for line in read_metrics(Path(out, "metrics.jsonl")):
                if line["step"] <= step:
                    self.log(line.pop("step"), {key: value for key, value in line.items() if value is not None})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step > self._seen:
            self._run.log(metrics, step=step)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        if step > self._seen:
            rows = [list(each.values()) for each in samples]
            self._run.log({"samples": self._table(columns=list(samples[0]), data=rows)}, step=step)

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self._run.summary.update({**metrics, "words": words})
        self._run.finish()

    def stop(self) -> None:
        self._run.finish(exit_code=1)


class Trackio:
    """A run of Trackio, in the user's TRACKIO_DIR, or where the environment says."""

    def __init__(
        self, *, project: str | None, name: str | None, config: dict[str, Any], out: str, step: int, seen: int
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

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if step > self._seen:
            self._run.log(metrics, step=step)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        rows = [list(each.values()) for each in samples]
        self.log(step, {"samples": self._package.Table(columns=list(samples[0]), data=rows)})

    def finish(self, step: int, metrics: dict[str, float], words: str) -> None:
        self.log(step, {"final": self._package.Markdown(_final(metrics, words))})
        self.stop()

    def stop(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


def _options(config: dict[str, Any]) -> str:
    return table([[name, str(value)] for name, value in config.items()], ["option", "value"])


def _final(metrics: dict[str, float], words: str) -> str:
    return f"{words}\n\n{table(list(metrics.items()), ['', 'at the end'])}"
