"""Files of a run that somebody else wrote over: a clear error, and no open that waits for ever."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from odc_triton.base.errors import CheckpointCorrupt
from odc_triton.checkpoint.folder import Manifest
from odc_triton.data.dataset import TokenizedDataset
from odc_triton.data.records import DataError
from odc_triton.train.metrics import read_metrics
from odc_triton.train.run_folder import RunFolder
from tests.support.deadlines import LONG_S

DEEP = "[" * 100_000
FIFO = None


def _take(path: Path) -> None:
    (path.parent / "metrics.jsonl").write_text('{"step": 1}\n')
    folder = RunFolder(path.parent)
    folder.lock(resume="auto")
    try:
        folder.take({"seed": 1})
    finally:
        folder.release()


READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "metrics.jsonl": (read_metrics, ValueError),
    "manifest.json": (lambda path: Manifest.read(path.parent), CheckpointCorrupt),
    "run.json": (_take, ValueError),
    "data.npz": (TokenizedDataset.load, DataError),
}


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", "[]\n", "line 1 has no step"),
        ("metrics.jsonl", '{"step": 1}\n{"step": "one"}\n', "line 2 has no step"),
        ("metrics.jsonl", f"{DEEP}\n", "line 1 is not valid JSON"),
        ("metrics.jsonl", FIFO, "is not a file"),
        ("manifest.json", DEEP, "is damaged"),
        ("manifest.json", FIFO, "is not a file"),
        ("run.json", DEEP, "can't be read: give another --out"),
        ("run.json", json.dumps({"identity": [1]}), "can't be read: give another --out"),
        ("data.npz", FIFO, "is not a file"),
    ],
    ids=lambda value: None if value is FIFO or len(value) > 40 else value,
)
def test_odd_content(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    path = tmp_path / name
    os.mkfifo(path) if content is FIFO else path.write_text(content)
    read, kind = READERS[name]
    with pytest.raises(kind, match=said) as caught:
        read(path)
    assert name in str(caught.value)
