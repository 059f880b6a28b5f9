"""All that the benchmarks ask of a GPU, in one place, and a stand-in for rehearsals that asks the host instead.

A rehearsal runs the benchmarks' own code without a GPU: the clock, the files, the report. Kernels then run in
Triton's interpreter on tiny sizes, and the host's clock times them. Such numbers say nothing about a GPU, so a
rehearsal's files are marked as such, and refused among the results.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import provenance

T = TypeVar("T")


def profiled(run: Callable[[], T]) -> tuple[T, list[tuple[str, float, float]]]:
    """What `run` returns; each kernel on the GPU meanwhile: name, begin and end, in seconds of `time.monotonic`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        offset_s = time.time() - time.monotonic()  # the profiler's clock is the time of day
        found = run()
    return found, [
        (event.name(), event.start_ns() / 1e9 - offset_s, (event.start_ns() + event.duration_ns()) / 1e9 - offset_s)
        for event in record.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]


class Gpu:
    """This process's current GPU.

    `rounds`: the fewest and the most to time. `flush_bytes`: far above any L2, and slow enough to write (0.2 ms or
    more) that the host has enqueued a whole call before the clock starts, so that the device is timed, not the
    launch. `side` and `copy_bytes`: the product and the copy that show what the machine reaches.
    """

    rehearsal = False
    type = "cuda"
    dtype = torch.bfloat16
    rounds = (10, 50)
    flush_bytes = 1 << 30
    side = 8192
    copy_bytes = 1 << 30

    def count(self) -> int:
        return torch.cuda.device_count()

    def about(self) -> dict[str, str] | None:
        """Name, memory, driver, clocks; None without a GPU."""
        return provenance.gpu()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def answers(self) -> bool:
        """Whether the context still works: after a fault, such as a wrong address, every further call fails."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def mark(self) -> Any:
        """A point on the current stream that `us_between` takes."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us_between(self, begin: Any, end: Any) -> float:
        """Microseconds from one mark to the other, after `synchronize`."""
        return begin.elapsed_time(end) * 1e3

    def free_cached(self) -> None:
        torch.cuda.empty_cache()

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Peak bytes that one call allocates, beyond those allocated before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def forget(self) -> float:
        """Frees what the last measurement left; returns GB in use now, from which `peak_gb` begins."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return self.peak_gb()

    def most_used_bytes(self) -> int:
        """The most that torch reserved, and all else in use on the device, such as symmetric memory."""
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.max_memory_reserved() + (total - free) - torch.cuda.memory_reserved()

    def peak_gb(self) -> float:
        return self.most_used_bytes() / 1e9


class Rehearsal(Gpu):
    """Pretends to be two GPUs, so that the sections for several are rehearsed too; measures no memory."""

    rehearsal = True
    type = "cpu"
    dtype = torch.float32
    rounds = (2, 3)
    flush_bytes = 1 << 10
    side = 64
    copy_bytes = 1 << 12

    def count(self) -> int:
        return 2

    def about(self) -> dict[str, str] | None:
        return {"name": "none: a rehearsal on the host"}

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def us_between(self, begin: float, end: float) -> float:
        return max((end - begin) * 1e6, 1e-3)

    def free_cached(self) -> None:
        pass

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        run()
        return 0

    def forget(self) -> float:
        gc.collect()
        return 0.0

    def most_used_bytes(self) -> int:
        return 0
