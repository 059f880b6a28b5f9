"""What the ranks tell each other once a step, when all gradients have landed: one barrier, no collective.

So every rank knows the same numbers and makes the same decisions: whether the step is taken, whether a checkpoint is
saved, whether the run stops. Gradients are clipped by these numbers too: torch's `clip_grad_norm_` reduces over gloo or
NCCL, which do not say which peer is dead, and wait for a stopped one without a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..engine.engine import Engine


def own_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's parts of the gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]


def square_norm(gradients: list[torch.Tensor]) -> float:
    """Sum of squares of all elements: norms are in the gradients' dtype, their squares are summed in fp64."""
    gradients = [each for each in gradients if each.numel()]
    if not gradients:
        return 0.0
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum().item()


@torch.no_grad()
def clip(gradients: list[torch.Tensor], *, norm: float, largest: float) -> None:
    """Scales gradients in place so that the whole model's `norm` is at most `largest`, as `clip_grad_norm_` does."""
    factor = largest / (norm + 1e-6)
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank says after a minibatch; joined, what follows from all ranks', the same on every rank."""

    loss_sum: float
    sums: Sequence[float] = ()  # other sums over its tokens
    square_norm: float  # of its gradients
    waited_s: float  # since the last agreement
    passed_s: float
    stop: int | None  # the signal that asked it to stop
    save: bool  # its clock says that a checkpoint is due; rank 0's decides
    writers: Sequence[dict[str, Any] | None] = (None,)  # how far each is with a checkpoint in the background

    @property
    def norm(self) -> float:
        return math.sqrt(self.square_norm)

    @property
    def idle(self) -> float:
        """Share of the ranks' time, 0 to 1."""
        return min(self.waited_s / self.passed_s, 1.0) if self.passed_s else 0.0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.square_norm)


def agree(engine: Engine, own: StepReport) -> StepReport:
    """Exchanges the reports of all ranks. Raises RankLost and DeadlineExceeded."""
    messages = engine.exchange(f"sum up minibatch {engine.state.number}", {"report": vars(own)})
    reports = [StepReport(**each["report"]) for each in messages]
    return StepReport(
        loss_sum=sum(each.loss_sum for each in reports),
        sums=[math.fsum(of_ranks) for of_ranks in zip(*(each.sums for each in reports), strict=True)],
        square_norm=sum(each.square_norm for each in reports),
        waited_s=sum(each.waited_s for each in reports),
        passed_s=sum(each.passed_s for each in reports),
        stop=next((each.stop for each in reports if each.stop is not None), None),
        save=reports[0].save,
        writers=[writer for each in reports for writer in each.writers],
    )
