"""metrics.jsonl: a line of JSON for each step, whole lines only, no step twice; and the progress bar."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ...base.files import atomic_file

Metrics = dict[str, Any]
_SHOWN = 300  # characters of a prompt or completion


def read_metrics(path: str | os.PathLike) -> list[Metrics]:
    """The lines of a metrics file, without the torn last line that a crash may leave. No file: no lines.

    Raises ValueError for a line that is not a step's metrics.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
    return [_read_line(path, number, line) for number, line in enumerate(lines, start=1)]


def _read_line(path: str | os.PathLike, number: int, line: bytes) -> Metrics:
    try:
        metrics = json.loads(line)
        if type(metrics["step"]) is int:
            return metrics
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path}, line {number} is not the metrics of a step: remove it, or give another --out")


class MetricsFile:
    """Appends to `path`, metrics.jsonl or another file whose lines have a `step`.

    First removes the lines of steps after `step`, which a resumed run takes again. `seen`: the last step in the file.
    """

    def __init__(self, path: str | os.PathLike, *, step: int) -> None:
        self.path = Path(path)
        lines = read_metrics(path)
        self.seen = lines[-1]["step"] if lines else 0
        kept = [line for line in lines if line["step"] <= step]
        with atomic_file(self.path) as file:
            file.write(b"".join(map(_line, kept)))
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, metrics: Metrics) -> None:
        """Writes one line with one system call. Raises OSError with the remedy if that fails."""
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
                f"{self.path} can't be written ({error.strerror}): check the folder and its free space, then continue "
                f"with --resume auto"
            ) from error

    def close(self) -> None:
        os.close(self._fd)


def without_nan(line: Mapping[str, Any]) -> Metrics:
    """The line with None for numbers that are not finite."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}


def _line(metrics: Metrics) -> bytes:
    return json.dumps(without_nan(metrics), allow_nan=False).encode() + b"\n"


_LOG_S = 60.0


class _Lines:
    """A log: each update of the progress bar becomes a line instead of overwriting the last one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()


def in_two_lines(sample: Mapping[str, Any]) -> tuple[str, str]:
    """A completion and its prompt: of that the end, which asks."""
    numbers = ", ".join(
        f"{name} {sample[name]:.3g}" for name in ("reward", "advantage") if sample.get(name) is not None
    )
    prompt, completion = (_printable(sample[name]) for name in ("prompt", "completion"))
    prompt = prompt if len(prompt) <= _SHOWN else f"…{prompt[-_SHOWN:]}"
    completion = completion if len(completion) <= _SHOWN else f"{completion[:_SHOWN]}…"
    return f"prompt: {prompt}", f"  completion ({numbers}): {completion}"


def _printable(text: str) -> str:
    """In one line, without what a terminal would act on."""
    return "".join(each if each.isprintable() else "�" for each in " ".join(text.split()))


class Progress:
    """Steps done of `total`, with the time left; without a terminal one line a minute. Silent unless `shown`."""

    def __init__(self, *, total: int, done: int, shown: bool) -> None:
        # tqdm's own lock is a named semaphore, which a killed rank would leave behind; only one thread uses it here.
        tqdm.set_lock(threading.RLock())
        is_log = not sys.stderr.isatty()
        pace = {"mininterval": _LOG_S, "file": _Lines(sys.stderr), "ncols": 0} if is_log else {}
        self._bar = tqdm(total=total, initial=done, unit="step", disable=not shown, **pace)

    def show(self, numbers: dict[str, str], texts: Sequence[str] = ()) -> None:
        """Counts one more step and shows its numbers, and texts above the bar."""
        if texts and not self._bar.disable:
            encoding = sys.stdout.encoding or "utf-8"
            with contextlib.suppress(OSError, ValueError):  # of a console that is gone: no reason to end a run
                self._bar.write("\n".join(texts).encode(encoding, "replace").decode(encoding), file=sys.stdout)
                sys.stdout.flush()
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
