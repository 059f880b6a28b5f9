"""Times on a GPU, side by side: every function once a round, the L2 flushed before each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from .operator import Run

WARM_UP = 3
LEAST_ROUNDS, MOST_ROUNDS = 10, 50
# Far above any L2, and long enough to write (0.2 ms or more) that the host has enqueued a whole call before the clock
# starts: what is timed is the device, not the launching.
FLUSH_BYTES = 1 << 30


def quantiles(us: Sequence[float]) -> dict[str, float]:
    """p20, p50, p80, the nearest of the values."""
    ordered = sorted(us)
    return {f"p{percent}": ordered[round((len(ordered) - 1) * percent / 100)] for percent in (20, 50, 80)}


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """The median and a 95% interval for it that assumes no distribution: by the order of the values alone."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low, high = max(math.floor(count / 2 - reach), 0), min(math.ceil(count / 2 + reach), count - 1)
    return {"median": quantiles(values)["p50"], "low": ordered[low], "high": ordered[high]}


def warm_up(runs: Mapping[str, Run]) -> tuple[dict[str, Run], dict[str, str]]:
    """The functions that run, after a few calls of each, and why the others don't: a baseline may need more memory, or
    a newer torch. What "ours" raises is raised.
    """
    good, missing = {}, {}
    for name, run in runs.items():
        try:
            for _ in range(WARM_UP):
                run()
            torch.cuda.synchronize()
            good[name] = run
        except (RuntimeError, TypeError) as error:
            if name == "ours":
                raise
            missing[name] = str(error).splitlines()[0]
    return good, missing


def interleaved(runs: Mapping[str, Run], *, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every call, one of each function a round, as many rounds as fit into `seconds` or so.

    Every round begins with another function, so that none always follows the same one.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    names = list(runs)
    us: dict[str, list[float]] = {name: [] for name in names}
    rounds, done = LEAST_ROUNDS, 0
    while done < rounds:
        turn = done % len(names)
        events = {}
        for name in names[turn:] + names[:turn]:
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            runs[name]()
            end.record()
            events[name] = begin, end
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            us[name].append(begin.elapsed_time(end) * 1e3)
        done += 1
        if done == LEAST_ROUNDS:
            round_seconds = sum(map(sum, us.values())) / done / 1e6 + 5e-4 * len(names)
            rounds = min(max(int(seconds / round_seconds), LEAST_ROUNDS), MOST_ROUNDS)
    return us


def peak_bytes(run: Run) -> int:
    """What one call allocates at its peak, beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
