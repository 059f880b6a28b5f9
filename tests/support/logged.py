"""What trackers kept of a run: read back from TensorBoard's files, or recorded in the place of a package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Kept = dict[str, list[tuple[int, Any]]]  # (step, value) by name, in the order of the file


def in_tensorboard(folder: Path) -> tuple[Kept, dict[str, list[str]]]:
    """Scalars, as fp32, and texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    tags = found.Tags()
    scalars = {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: [each.tensor_proto.string_val[0].decode() for each in found.Tensors(tag)] for tag in tags["tensors"]}
    return scalars, texts


class Recorder:
    """In the place of wandb, trackio or swanlab: what it was asked to do, one line of JSON a call."""

    def __init__(self, path: Path) -> None:
        self.path, self.id, self.summary, self.echarts = path, "an-id", self, self

    def init(self, **how: Any) -> Recorder:
        self._keep("init", how)
        return self

    def log(self, metrics: dict[str, Any], *, step: int) -> None:
        self._keep("log", step, metrics)

    def update(self, summary: dict[str, Any]) -> None:
        self._keep("summary", summary)

    def finish(self, *status: str, **how: Any) -> None:
        self._keep("finish", *status, how)

    class Table(list):
        def __init__(self, columns: Sequence[str] = (), data: Sequence[list[Any]] = ()) -> None:
            self.add(columns, data)

        def add(self, columns: Sequence[str], data: Sequence[list[Any]]) -> None:
            self += [columns, *data] if columns else []

    Markdown = Text = str

    def _keep(self, *call: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(call, default=str) + "\n")

    def calls(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]
