"""Peak memory of a call, as torch's profiler counts it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes that torch allocates during the call beyond what was allocated before, at their peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        run()
    changes = [event.nbytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(torch.tensor(changes).cumsum(0).max())
