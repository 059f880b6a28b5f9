"""A job for the simulator from measured times of single sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odc_triton.balance.cost import CostModel
from odc_triton.simulate.hardware import Links
from odc_triton.simulate.job import Job


@dataclass(frozen=True, kw_only=True)
class SequenceTime:
    """`seconds` of a minibatch in which every rank ran one sequence of `tokens` tokens `microbatches` times."""

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
) -> Job:
    """A job whose times are `step + microbatches (launch + linear s + quadratic s²)`, fitted to the measured ones.

    All ranks ran the same, so none waited, and these numbers include all communication: links add no time.
    Transfers block, as on the CPU. `cost`: what balancing assumes; by default the fitted cost. Measurements of one
    transport predict only that transport's schedules.

    Raises ValueError for fewer than three lengths, for a single number of microbatches (step and launch can't be told
    apart then), and if times don't grow with lengths.
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
    # Times differ by much, so fit the relative error.
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
    )


def nonnegative_least_squares(table: np.ndarray, target: Sequence[float]) -> np.ndarray:
    """argmin |table x - target| over x >= 0. Few columns: trying each support is exact."""
    target = np.asarray(target, dtype=np.float64)
    best, best_error = np.zeros(table.shape[1]), math.inf
    for size in range(1, table.shape[1] + 1):
        for support in map(list, itertools.combinations(range(table.shape[1]), size)):
            x = np.zeros(table.shape[1])
            x[support] = np.linalg.lstsq(table[:, support], target, rcond=None)[0]
            error = float(np.square(table @ x - target).sum())
            if (x >= 0).all() and error < best_error:
                best, best_error = x, error
    return best
