"""metrics.jsonl: one line of JSON for each step, whole lines only, each step once."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..base.atomic import atomic_file

Metrics = dict[str, Any]


def read_metrics(path: str | os.PathLike) -> list[Metrics]:
    """The lines of a metrics file; a torn last one, as a crash may leave, is left out. No file: no lines.

    Raises ValueError for a line that is none of a step's metrics, and for what is no file.
    """
    if not Path(path).is_file():
        if Path(path).exists():
            raise ValueError(f"{path} is no file: remove it, or give another --out")
        return []
    lines = Path(path).read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
    return [_read_line(path, number, line) for number, line in enumerate(lines, start=1)]


def _read_line(path: str | os.PathLike, number: int, line: bytes) -> Metrics:
    try:
        metrics = json.loads(line)
        if isinstance(metrics, dict) and type(metrics["step"]) is int:
            return metrics
        problem = "has no step"
    except KeyError:
        problem = "has no step"
    except (ValueError, RecursionError):
        problem = "is no JSON"
    raise ValueError(f"{path}, line {number} {problem}: remove it, or give another --out")


class MetricsFile:
    """Appends to `path`. Lines of steps after `step`, which a resumed run takes again, are removed first."""

    def __init__(self, path: str | os.PathLike, *, step: int) -> None:
        self.path = Path(path)
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        with atomic_file(self.path) as file:
            file.write(b"".join(map(_line, kept)))
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, metrics: Metrics) -> None:
        """One line, in one call to the system. Raises OSError with the remedy if it can't be kept."""
        line = _line(metrics)
        try:
            there = os.stat(self.path)
            own = os.fstat(self._fd)
            if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
                raise FileNotFoundError(0, "another file has taken its place")
            written = os.write(self._fd, line)
            if written < len(line):
                os.ftruncate(self._fd, own.st_size)
                raise OSError(0, "no space left")
        except OSError as error:
            raise OSError(
                f"{self.path} can't be written ({error.strerror}): see to the folder and its space, then go on "
                f"with --resume auto"
            ) from error

    def close(self) -> None:
        os.close(self._fd)


def _line(metrics: Metrics) -> bytes:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"
