"""Times on a GPU (or a stand-in), side by side: every function once per round, the L2 flushed before each.

And the roofline: the least time that a call could take, the longer of its arithmetic and its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..device import Gpu
from .problem import Run, Work

WARM_UP = 3


def quantiles(us: Sequence[float]) -> dict[str, float]:
    """p20, p50, p80, each the nearest of the values."""
    ordered = sorted(us)
    return {f"p{percent}": ordered[round((len(ordered) - 1) * percent / 100)] for percent in (20, 50, 80)}


def warm_up(runs: Mapping[str, Run], gpu: Gpu) -> tuple[dict[str, Run], dict[str, str]]:
    """Calls each function a few times. Returns those that run, and why the others don't: a baseline may need more
    memory, or a newer torch. Errors of "ours" are raised.
    """
    good, missing = {}, {}
    for name, run in runs.items():
        try:
            for _ in range(WARM_UP):
                run()
            gpu.synchronize()
            good[name] = run
        except (RuntimeError, TypeError) as error:
            if name == "ours":
                raise
            missing[name] = str(error).splitlines()[0]
    return good, missing


def interleaved(runs: Mapping[str, Run], gpu: Gpu, *, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every call: each round calls every function once, for as many rounds as fit into about `seconds`.

    Every round begins with another function.
    """
    flush = torch.empty(gpu.flush_bytes, dtype=torch.int8, device=gpu.type)
    names = list(runs)
    us: dict[str, list[float]] = {name: [] for name in names}
    least, most = gpu.rounds
    rounds, done = least, 0
    while done < rounds:
        turn = done % len(names)
        marks = {}
        for name in names[turn:] + names[:turn]:
            flush.zero_()
            begin = gpu.mark()
            runs[name]()
            marks[name] = begin, gpu.mark()
        gpu.synchronize()
        for name, (begin, end) in marks.items():
            us[name].append(gpu.us_between(begin, end))
        done += 1
        if done == least:
            round_seconds = sum(map(sum, us.values())) / done / 1e6 + 5e-4 * len(names)
            rounds = min(max(int(seconds / round_seconds), least), most)
    return us


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this GPU reached in this run, so that the roofline includes its clocks and its heat."""

    flops: float
    hbm_bytes_s: float  # counting both reads and writes

    @classmethod
    def measured(cls, gpu: Gpu, *, dtype: torch.dtype, seconds: float = 0.5) -> Machine:
        """The rates of the library's product of two square matrices and of copies, on random numbers."""
        a, b = (torch.randn(gpu.side, gpu.side, device=gpu.type, dtype=dtype) for _ in range(2))
        source = torch.randint(-128, 127, (gpu.copy_bytes,), dtype=torch.int8, device=gpu.type)
        target, out = torch.empty_like(source), torch.empty_like(a)
        runs = {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
        for run in runs.values():
            run()
        second = {name: quantiles(us)["p50"] / 1e6 for name, us in interleaved(runs, gpu, seconds=seconds).items()}
        return cls(flops=2 * gpu.side**3 / second["product"], hbm_bytes_s=2 * gpu.copy_bytes / second["copy"])

    def seconds(self, work: Work) -> float:
        """The roofline. The peers' memory is this GPU's, and their traffic is added to its own."""
        return max(work.flops / self.flops, (work.hbm_bytes + work.peer_bytes) / self.hbm_bytes_s)
