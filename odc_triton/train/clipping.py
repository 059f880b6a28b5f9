"""Clipping by the norm of all shards' gradients, without a collective: the parts are summed at a meeting.

torch's `clip_grad_norm_` reduces over gloo or NCCL, where a dead peer has no name and a stopped one no deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def own_gradients(parameters: Iterable[nn.Parameter], rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(this rank's gradients, those of them that count in the norm here): what is replicated counts on rank 0 only."""
    local, counted = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        replicated = isinstance(gradient, DTensor) and all(place.is_replicate() for place in gradient.placements)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        local.append(gradient)
        if rank == 0 or not replicated:
            counted.append(gradient)
    return local, counted


def square_norm(gradients: list[torch.Tensor]) -> float:
    """Sum of squares of all elements: norms in the gradients' dtype, their squares summed in fp64."""
    gradients = [each for each in gradients if each.numel()]
    if not gradients:
        return 0.0
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum().item()


@torch.no_grad()
def clip(gradients: list[torch.Tensor], *, norm: float, largest: float) -> None:
    """Scales gradients of the whole model's `norm` to `largest`, in place, as torch's `clip_grad_norm_` does."""
    factor = largest / (norm + 1e-6)
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)


def whole_norm(squares: Iterable[float]) -> float:
    """The norm from every rank's `square_norm`."""
    return math.sqrt(sum(squares))
