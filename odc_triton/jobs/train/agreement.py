"""A run's parts in the barrier of a step, once gradients are reduced: all ranks know the same, and decide the same.

Gradients are clipped by these numbers too: torch's `clip_grad_norm_` reduces over gloo or NCCL, which do not say which
peer is dead, and wait for a stopped one without a deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...base.events import Event, EventLog, total_s
from ...step import StepPart


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


class GradientNorm(StepPart):
    """`total`: the norm of all ranks' gradients in the last step; `own`: this rank's parts of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.own: list[torch.Tensor] = []
        self.total = 0.0

    def report(self) -> float:
        self.own = own_gradients(each for each in self._model.parameters() if each.requires_grad)
        return square_norm(self.own)

    def settle(self, reports: list[float]) -> None:
        self.total = math.sqrt(sum(reports))

    def clip(self, largest: float) -> None:
        """Scales gradients in place so that the whole model's norm is at most `largest`, as `clip_grad_norm_` does."""
        factor = largest / (self.total + 1e-6)
        if factor < 1 and self.own:
            with torch.no_grad():
                torch._foreach_mul_(self.own, factor)

    def clear(self) -> None:
        """Keeps no gradient between steps."""
        self.own = []


class IdleTime(StepPart):
    """`share`: of the ranks' time since the step before, 0 to 1, that they waited for each other."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._after: list[Event] = []  # of the last step, since its report: their waits count in the next one
        self._reported_s = time.monotonic()
        self.share = 0.0
        self.step: list[Event] = []  # of the last step

    def report(self) -> list[float]:
        self.step, now_s = self._events.drain(), time.monotonic()
        own = [total_s(self._after + self.step, "wait"), now_s - self._reported_s]
        self._reported_s = now_s
        return own

    def settle(self, reports: list[list[float]]) -> None:
        waited_s, passed_s = (sum(column) for column in zip(*reports, strict=True))
        self.share = min(waited_s / passed_s, 1.0) if passed_s else 0.0

    def end(self) -> None:
        """The optimizer has stepped."""
        self._after = self._events.drain()
        self.step = self.step + self._after

    def restart(self) -> None:
        """What has passed since the last report was no step."""
        self._events.drain()
        self._after = []
        self._reported_s = time.monotonic()
