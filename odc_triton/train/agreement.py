"""What the ranks tell each other once a step, when all gradients have landed: one meeting, no collective.

So every rank knows the same numbers and comes to the same decisions: whether the step is taken, whether a checkpoint is
saved, whether the run stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..engine.engine import Engine
from .clipping import whole_norm


@dataclass(frozen=True, kw_only=True)
class Told:
    """One rank's part."""

    loss_sum: float
    square_norm: float  # of its gradients
    waited_s: float  # since the last agreement
    passed_s: float
    stop: int | None  # the signal that it was asked to stop by
    save: bool  # its clock says that a checkpoint is due; rank 0's counts


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """All ranks together, the same on every rank."""

    loss_sum: float
    norm: float
    idle: float  # share of the ranks' time, 0 to 1
    stop: int | None
    save: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)


def agree(engine: Engine, told: Told) -> Agreed:
    """Meets the other ranks. Raises RankLost and DeadlineExceeded."""
    messages: list[dict[str, Any]] = engine.meet(f"sum up minibatch {engine.minibatch}", vars(told))
    passed_s = sum(each["passed_s"] for each in messages)
    return Agreed(
        loss_sum=sum(each["loss_sum"] for each in messages),
        norm=whole_norm(each["square_norm"] for each in messages),
        idle=min(sum(each["waited_s"] for each in messages) / passed_s, 1.0) if passed_s else 0.0,
        stop=next((each["stop"] for each in messages if each["stop"] is not None), None),
        save=messages[0]["save"],
    )
