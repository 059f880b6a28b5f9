"""The progress bar: how far, how long still, and how the last step went."""

from __future__ import annotations

import sys
import threading
from typing import TextIO

from tqdm import tqdm

from .metrics import Metrics

_LOG_S = 60.0


class _Lines:
    """A log: what a bar draws over itself becomes lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()


class Progress:
    """Steps done of `total`, with the time left; without a terminal a line a minute. Quiet where it is not `shown`."""

    def __init__(self, *, total: int, done: int, shown: bool) -> None:
        # Its own lock is a named semaphore, which a killed rank would leave behind; here is one thread.
        tqdm.set_lock(threading.RLock())
        # Without a terminal each line stands for itself: in a job's log.
        is_log = not sys.stderr.isatty()
        pace = {"mininterval": _LOG_S, "file": _Lines(sys.stderr), "ncols": 0} if is_log else {}
        self._bar = tqdm(total=total, initial=done, unit="step", disable=not shown, **pace)

    def show(self, metrics: Metrics) -> None:
        """One step more, with its numbers."""
        numbers = {
            "loss": f"{metrics['loss']:.4f}",
            "targets/s": f"{metrics['target_tokens_per_s']:.0f}",
            "idle": f"{metrics['idle']:.0%}",
        }
        if "eval_loss" in metrics:
            numbers["eval"] = f"{metrics['eval_loss']:.4f}"
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
