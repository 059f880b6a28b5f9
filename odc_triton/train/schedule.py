"""The learning rate over the steps: linear warm-up, then a cosine down to a fraction of the peak. Pure."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, steps: int, warmup_steps: int, floor: float) -> float:
    """The factor of the peak learning rate at `step`, counted from 0, of `steps`; `floor` is reached at the end."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if steps <= warmup_steps:
        return 1.0
    progress = min((step - warmup_steps) / (steps - warmup_steps), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
