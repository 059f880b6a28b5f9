"""The least time of a step whose rollout and update overlap, from when a step in phases had its completions.

`work`: for each group of completions (seconds from the rollout's start until it was sampled, seconds to compute it).
Nothing is computed before it was sampled, and no rank does two things at once; all else is assumed to be ideal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Work = Sequence[tuple[float, float]]


def least_s(work: Work, sampling_s: Sequence[float] = (0.0,)) -> float:
    """Seconds of rollout and update together. `sampling_s`: for each rank that computes, how long it samples itself."""
    ranks, total_s = len(sampling_s), math.fsum(seconds for _, seconds in work)
    after_s = [at_s + math.fsum(s for other_s, s in work if other_s >= at_s) / ranks for at_s, _ in work]
    return max((math.fsum(sampling_s) + total_s) / ranks, *sampling_s, *after_s)


def shared_out(total_s: float, costs: Sequence[float]) -> list[float]:
    """`total_s` in proportion to costs."""
    return [total_s * cost / math.fsum(costs) for cost in costs]
