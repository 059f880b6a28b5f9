"""A job from measured times of single sequences, for a prediction that can be held against a measured run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..balance.cost import CostModel, nonnegative_least_squares
from .job import Job
from .links import Links


@dataclass(frozen=True, kw_only=True)
class SequenceTime:
    """`seconds` of a minibatch in which every rank ran `microbatches` times one sequence of `tokens` tokens."""

    tokens: int
    microbatches: int
    seconds: float

    def __post_init__(self) -> None:
        for name in ("tokens", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"SequenceTime.{name} is {getattr(self, name)}: give 1 or more")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"SequenceTime.seconds is {self.seconds}: drop measurements that failed")


def from_measured(
    sequence_seconds: Sequence[SequenceTime],
    *,
    ranks: int,
    layers: int,
    cost: CostModel | None = None,
    slow: Mapping[int, float] | None = None,
) -> Job:
    """A job whose times are `step + microbatches (launch + linear s + quadratic s²)`, fitted to the measured ones.

    All ranks ran the same, so nobody waited, and whatever was communicated is in these numbers: links take no more
    time. Transfers block, as on the CPU. `cost`: what balancing believes; by default what was fitted. One transport's
    measurements predict that transport's schedules only.

    Raises ValueError with fewer than three lengths, or with one number of microbatches only, as step and launch can't
    be told apart then; and where times don't grow with lengths.
    """
    lengths = {each.tokens for each in sequence_seconds}
    repeats = {each.microbatches for each in sequence_seconds}
    if len(lengths) < 3 or len(repeats) < 2:
        raise ValueError(
            f"from_measured: {len(lengths)} lengths and {len(repeats)} numbers of microbatches: measure at least three "
            "lengths, each in minibatches of one and of more microbatches"
        )
    table = np.array(
        [[1, m.microbatches, m.microbatches * m.tokens, m.microbatches * m.tokens**2] for m in sequence_seconds]
    )
    seconds = np.array([m.seconds for m in sequence_seconds])
    # Of times that differ much, the relative error counts.
    weighted = table / seconds[:, None]
    scale = weighted.max(axis=0)
    step, launch, linear, quadratic = nonnegative_least_squares(weighted / scale, np.ones(len(seconds))) / scale
    fitted = CostModel(quadratic=float(quadratic), linear=float(linear), microbatch=float(launch))
    return Job(
        links=Links.none(ranks),
        seconds=fitted.pack,
        cost=cost or fitted,
        layers=layers,
        prefetch=False,
        overlap=False,
        step_s=float(step),
        slow=slow or {},
    )
