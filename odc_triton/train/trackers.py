"""Trackers of a run, TensorBoard, Weights & Biases or Trackio: rank 0 tells each what the run does, and never waits.

A tracker may raise, hang, be slow, or start processes. So each runs in a process of its own (`tracker_process.py`),
which gets lines of JSON over a socket. What the socket does not take at once is kept and sent at the next step. A
tracker that fails is told once on stderr, and the run goes on without it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..comm.launch import how_it_ended
from .run_options import RunOptions

END_S = 30.0  # that a finished run waits for its trackers
STOP_S = 5.0  # that a stopped or failed one does
_MOST_BYTES = 16 * 2**20  # kept for a tracker that takes nothing
_PART = 2**16
_NAP_S = 0.02
_KILL_S = 1.0
_CODE = """
import sys
descriptor, parent, *sys.path[:] = sys.argv[1:]
from odc_triton.train.tracker_process import serve
serve(int(descriptor), int(parent))
"""


def require_trackers(names: Sequence[str]) -> None:
    """Raises ImportError with the remedy for a tracker whose package is not installed."""
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f'--report-to {name} needs {name}; run: pip install "odc-triton[{name}]"') from None


class Trackers:
    """The trackers that `options.report_to` names; there may be none.

    A run that goes on after `step` had taken steps up to `seen` before. Leave no step out, and `close` at the end.
    """

    def __init__(self, options: RunOptions, *, ranks: int, step: int = 0, seen: int = 0) -> None:
        out = Path(options.out).absolute()
        start = {
            "project": options.project,
            "name": options.run_name,
            "config": asdict(options) | {"ranks": ranks},
            "out": str(out),
            "step": step,
            "seen": seen,
        }
        self._running = [_Tracker(name, start) for name in options.report_to]

    def __bool__(self) -> bool:
        return bool(self._running)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Tells a step's metrics, those that are finite numbers."""
        self._tell({"step": metrics["step"], "metrics": _finite(metrics)})

    def log_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Tells an evaluation's samples: lines of samples.jsonl, all of one step."""
        self._tell({"step": samples[0]["step"], "samples": [_without_nan(each) for each in samples]})

    def finish(self, metrics: Mapping[str, Any], words: str) -> None:
        """Tells the final numbers, and in `words` what became of the run; `close` then waits for the trackers."""
        self._tell({"step": metrics["step"], "final": _finite(metrics), "words": words})

    def _tell(self, message: dict[str, Any]) -> None:
        for each in self._running:
            each.tell(message)

    def close(self, *, within_s: float = STOP_S) -> None:
        """Ends all trackers, at the latest after `within_s` seconds, and says which have not taken all steps."""
        running, self._running = self._running, []
        deadline = time.monotonic() + within_s
        try:
            while [each for each in running if not each.has_ended()] and time.monotonic() < deadline:
                time.sleep(_NAP_S)
            for each in running:
                each.conclude(within_s)
        finally:
            for each in running:
                each.kill()


class _Tracker:
    """One tracker's process: another program, in its own session, which the kernel kills when this thread ends."""

    def __init__(self, name: str, start: dict[str, Any]) -> None:
        self.name, self._unsent, self._last, self._problem = name, bytearray(), start["step"], ""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), str(os.getpid()), *sys.path],
                stdin=subprocess.DEVNULL,  # else wandb asks for a login
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.tell({"tracker": name, **start})

    def tell(self, message: dict[str, Any]) -> None:
        """Sends what the socket takes now, and keeps the rest."""
        if self._problem:
            return
        self._last = message["step"]
        self._unsent += json.dumps(message).encode() + b"\n"
        if len(self._unsent) > _MOST_BYTES:
            self._fail(f"it took nothing for so long that {_MOST_BYTES >> 20} MiB wait for it")
            return
        self._send()
        if "final" not in message:  # after which it ends
            self._listen()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed, which `_listen` finds
            while self._unsent:
                del self._unsent[: self._channel.send(self._unsent[:_PART])]

    def _listen(self) -> None:
        """Fails if the process said why it ends, or is gone."""
        try:
            said = self._channel.recv(_PART)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._fail(said.decode(errors="replace") or self._ended())

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return how_it_ended(self._process.wait(_KILL_S))
        return "its process closed the socket"

    def _fail(self, problem: str) -> None:
        self._problem = problem
        self.kill()
        print(
            f"odc-triton: {self.name} is off since step {self._last}, and the run goes on without it: {problem}",
            file=sys.stderr,
            flush=True,
        )

    def has_ended(self) -> bool:
        """Whether the process has ended, which is told that nothing follows once it has taken all."""
        if self._problem:
            return True
        self._send()
        if not self._unsent:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
        return self._process.poll() is not None

    def conclude(self, waited_s: float) -> None:
        """Says what the tracker lacks, if it does, after the last step."""
        if self._problem:
            print(f"{self.name} was off since step {self._last}; metrics.jsonl has all steps: {self._problem}")
        elif self._process.returncode is None:
            print(
                f"odc-triton: {self.name} had not taken all steps {waited_s:g} s after the end and is killed; "
                f"metrics.jsonl has them",
                file=sys.stderr,
            )
        elif self._process.returncode:
            self._listen()

    def kill(self) -> None:
        """Kills the process, if it has not ended. One that hangs in its file system is left to the kernel."""
        self._channel.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != "step"}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _without_nan(line: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
