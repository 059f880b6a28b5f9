"""What trackers kept of a run, read back from their own files."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

Kept = dict[str, list[tuple[int, Any]]]  # (step, value) by name, in the order of the file
_BLOCK = 32768  # of LevelDB's log format, in which wandb writes records


def in_tensorboard(folder: Path) -> tuple[Kept, dict[str, list[str]]]:
    """Scalars, as fp32, and texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    tags = found.Tags()
    scalars = {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: [each.tensor_proto.string_val[0].decode() for each in found.Tensors(tag)] for tag in tags["tensors"]}
    return scalars, texts


def _records(path: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    data, at, part, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, count, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + count]
        at += 7 + count
        if kind in (1, 4):  # whole, or its last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def in_wandb(folder: Path) -> list[tuple[str, Kept, dict[str, Any]]]:
    """(run id, history, summary) of each offline start, oldest first."""
    starts = []
    for path in sorted(folder.glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        run_id, kept, summary = "", defaultdict(list), {}
        for record in _records(path):
            if record.HasField("run"):
                run_id = record.run.run_id
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                kept[name].append((record.history.step.num, json.loads(item.value_json)))
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        starts.append((run_id, dict(kept), summary))
    return starts


def in_trackio(project: str) -> tuple[list[tuple[str, dict]], Kept]:
    """(name, options) of each run, and what was logged under the last one's name, from the store in TRACKIO_DIR."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = [(run.name, run.config) for run in trackio.Api().runs(project)]
    kept = defaultdict(list)
    for line in SQLiteStorage.get_logs(project, runs[-1][0]):
        step = line.pop("step")
        for name, value in line.items():
            kept[name].append((step, value))
    return runs, dict(kept)
