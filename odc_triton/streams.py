"""In which order a rank's device works: what is computed, what is copied from peers, what is added to them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from .errors import DeadlineExceeded

_POLL_S = 50e-6
_IN_FLIGHT_BYTES = 512 * 2**20


class Streams:
    """The CPU's: everything is done when the call returns, so there is nothing to order or to wait for."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied from peers inside follows all that was enqueued to be computed before."""
        yield

    def copied(self) -> Any:
        """A mark behind the copies so far, for `wait`."""

    def wait(self, mark: Any) -> None:
        """What is computed from here on follows the mark."""

    @contextlib.contextmanager
    def adding(self, gradient: torch.Tensor) -> Iterator[None]:
        """What is added to peers inside follows all that was enqueued to be computed before, so the gradient too."""
        yield

    def drain(self, timeout_s: float, purpose: str) -> None:
        """Waits until the device has done all that was enqueued. Raises DeadlineExceeded."""


class CudaStreams(Streams):
    """One GPU's: copies from peers and additions to peers have streams of their own, beside the current one.

    [Note: memory of side streams] The caching allocator knows one stream per block, the one that was current when
    it was allocated. So every block that a side stream works on is allocated and freed on the current stream, and
    freed only behind the side stream's work: whole parameters after `wait`, gradients when their addition is seen to
    be done, or, when more than 512 MiB are held so, after the current stream was told to wait for the oldest.
    `Tensor.record_stream` would do it too, and would keep blocks from reuse for as long as the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy, self._add = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in_flight: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._in_flight_bytes = 0

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self._copy.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copy):
            yield

    def copied(self) -> torch.cuda.Event:
        return self._copy.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    @contextlib.contextmanager
    def adding(self, gradient: torch.Tensor) -> Iterator[None]:
        self._add.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._add):
            yield
        self._in_flight.append((self._add.record_event(), gradient))
        self._in_flight_bytes += gradient.nbytes
        while self._in_flight and self._in_flight[0][0].query():
            self._let_go()
        while self._in_flight_bytes > _IN_FLIGHT_BYTES:
            self.wait(self._in_flight[0][0])
            self._let_go()

    def _let_go(self) -> None:
        _, gradient = self._in_flight.popleft()
        self._in_flight_bytes -= gradient.nbytes

    def drain(self, timeout_s: float, purpose: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        for stream in (torch.cuda.current_stream(self._device), self._copy, self._add):
            done = stream.record_event()
            while not done.query():
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded([], f"{self._device} was still busy after {timeout_s:.1f} s: {purpose}")
                time.sleep(_POLL_S)
        self._in_flight.clear()
        self._in_flight_bytes = 0
