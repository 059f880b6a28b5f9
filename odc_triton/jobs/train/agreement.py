"""The barrier of a training step, once gradients are reduced: ranks exchange reports, and all make the same decisions.

Gradients are clipped by these numbers too: torch's `clip_grad_norm_` reduces over gloo or NCCL, which do not say which
peer is dead, and wait for a stopped one without a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...engine.minibatch import StepPart
from ...engine.module import Engine


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
class StepSums:
    """One rank's after a minibatch, or those of all ranks, where the losses decide whether the step is taken."""

    loss_sum: float
    sums: Sequence[float] = ()  # other sums over its tokens
    square_norm: float  # of its gradients
    waited_s: float  # since the last step
    passed_s: float

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


def sum_up(engine: Engine, own: StepSums, parts: Sequence[StepPart] = ()) -> StepSums:
    """Exchanges the sums and the parts' reports; returns the sums of all ranks. Raises RankLost, DeadlineExceeded, and
    what a part raises.
    """
    message = {"sums": vars(own), "parts": {part.name: part.report() for part in parts}}
    messages = engine.exchange(f"sum up minibatch {engine.number}", message)
    for part in parts:
        part.settle([theirs["parts"][part.name] for theirs in messages])
    every = [StepSums(**theirs["sums"]) for theirs in messages]
    return StepSums(
        loss_sum=sum(each.loss_sum for each in every),
        sums=[math.fsum(of_ranks) for of_ranks in zip(*(each.sums for each in every), strict=True)],
        square_norm=sum(each.square_norm for each in every),
        waited_s=sum(each.waited_s for each in every),
        passed_s=sum(each.passed_s for each in every),
    )
