"""The interface to a device with streams: a GPU, or a CPU that simulates one.

A stream is a torch.cuda.Stream, or has its methods `wait_stream`, `wait_event` and `record_event`; an event has its
`query`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

Memory = torch.Tensor | torch.UntypedStorage | None


class Device(Protocol):
    def current(self) -> Any:
        """The current stream, which computes."""

    def stream(self) -> Any:
        """A new stream, with priority over the current one."""

    def pull_stream(self) -> Any:
        """The one stream on which launchers copy what their kernels read."""

    def enqueue(self, stream: Any, work: Callable[..., object], memory: Memory = None) -> None:
        """Enqueues `work` on the stream. `memory`: read or filled by it; a tensor is passed to `work`."""

    def allocate(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Allocates a storage's memory, uninitialised."""

    def free(self, storage: torch.UntypedStorage) -> None:
        """Frees a storage's memory."""

    def has_come(self, event: Any) -> bool:
        """True if the device has reached the event, which the host is waiting for."""


class CudaDevice:
    """A GPU, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __str__(self) -> str:
        return str(self._device)

    def current(self) -> torch.cuda.Stream:
        """Raises RuntimeError while that stream is captured into a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph can't hold a sharded model: it would repeat copies from other ranks and waits for them "
                "without the barriers between. Don't capture anything that runs it, and avoid torch.compile's modes "
                "that capture ('reduce-overhead', 'max-autotune')"
            )
        return torch.cuda.current_stream(self._device)

    def stream(self) -> torch.cuda.Stream:
        # High priority: torch cycles through 32 streams per priority, and a program may make many of low priority.
        return torch.cuda.Stream(self._device, priority=-1)

    def pull_stream(self) -> torch.cuda.Stream:
        return _pull_stream(self._device)

    def enqueue(self, stream: torch.cuda.Stream, work: Callable[..., object], memory: Memory = None) -> None:
        with torch.cuda.stream(stream):
            work(memory) if isinstance(memory, torch.Tensor) else work()

    def allocate(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        storage.resize_(size_bytes)

    def free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def has_come(self, event: torch.cuda.Event) -> bool:
        return event.query()


@functools.cache
def _pull_stream(device: torch.device) -> torch.cuda.Stream:
    return CudaDevice(device).stream()


def device_of(tensor: torch.Tensor) -> Device | None:
    """A tensor's GPU; None on the CPU, where all work is done when a call returns."""
    return CudaDevice(tensor.device) if tensor.is_cuda else None
