"""In which order a rank's device works: what is computed, what is copied from peers, what is added to them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .errors import DeadlineExceeded

_POLL_S = 50e-6
_IN_FLIGHT_BYTES = 512 * 2**20


class Copies:
    """Some copies from peers. Whoever has made them can be told to wait for them."""


class Streams:
    """The CPU's: everything is done when the call returns, so there is nothing to order or to wait for."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[Copies]:
        """What is copied from peers inside follows all that was enqueued to be computed before, and comes before what
        follows the copies that it yields.
        """
        yield Copies()

    def wait(self, copies: Copies) -> None:
        """What is computed from here on follows the copies."""

    def before_freeing(self, copies: Copies) -> None:
        """What is computed in memory that is freed from here on follows the copies into it, and what used them."""

    @contextlib.contextmanager
    def adding(self, gradient: torch.Tensor) -> Iterator[None]:
        """What is added to peers inside follows all that was enqueued to be computed before, so the gradient too."""
        yield

    def drain(self, timeout_s: float, purpose: str) -> None:
        """Waits until the device has done all that was enqueued. Raises DeadlineExceeded."""


@dataclass(slots=True)
class _CudaCopies(Copies):
    """`home`: the stream that was current when they were begun, so that their memory was allocated on."""

    home: torch.cuda.Stream
    done: torch.cuda.Event | None = None


class CudaStreams(Streams):
    """One GPU's: copies from peers and additions to peers have streams of their own, beside the current one.

    [Note: memory of side streams] The caching allocator knows one stream per block, the one that was current when
    it was allocated. So every block that a side stream works on is allocated on the current stream, and freed only
    when that stream follows the side stream's work: whole parameters by `before_freeing`, gradients when their addition
    is seen to be done, or, when more than 512 MiB are held so, after the current stream was told to wait for the
    oldest. `Tensor.record_stream` would do it too, and would keep blocks from reuse for as long as the host runs ahead.

    Which stream is current is the caller's choice, and may change within a minibatch: `drain` waits for all that were.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy, self._add = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in_flight: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._in_flight_bytes = 0
        self._computing: dict[int, torch.cuda.Stream] = {}  # what was current since the last drain

    def _current(self) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self._device)
        self._computing[stream.cuda_stream] = stream
        return stream

    @contextlib.contextmanager
    def copying(self) -> Iterator[_CudaCopies]:
        copies = _CudaCopies(home=self._current())
        self._copy.wait_stream(copies.home)
        try:
            with torch.cuda.stream(self._copy):
                yield copies
        finally:
            copies.done = self._copy.record_event()

    def wait(self, copies: _CudaCopies) -> None:
        self._current().wait_event(copies.done)

    def before_freeing(self, copies: _CudaCopies) -> None:
        copies.home.wait_event(copies.done)
        if (current := self._current()) != copies.home:
            copies.home.wait_stream(current)

    @contextlib.contextmanager
    def adding(self, gradient: torch.Tensor) -> Iterator[None]:
        self._add.wait_stream(self._current())
        with torch.cuda.stream(self._add):
            yield
        self._in_flight.append((self._add.record_event(), gradient))
        self._in_flight_bytes += gradient.nbytes
        while self._in_flight and self._in_flight[0][0].query():
            self._let_go()
        while self._in_flight_bytes > _IN_FLIGHT_BYTES:
            self._current().wait_event(self._in_flight[0][0])
            self._let_go()

    def _let_go(self) -> None:
        _, gradient = self._in_flight.popleft()
        self._in_flight_bytes -= gradient.nbytes

    def drain(self, timeout_s: float, purpose: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._current()
        for stream in (*self._computing.values(), self._copy, self._add):
            done = stream.record_event()
            while not done.query():
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded([], f"{self._device} was still busy after {timeout_s:.1f} s: {purpose}")
                time.sleep(_POLL_S)
        self._computing.clear()
        self._in_flight.clear()
        self._in_flight_bytes = 0
