"""A model's sharded parameters, and their whole values."""

from __future__ import annotations

import torch
from torch import nn

from ..engine.api import engine_of
from ..engine.parameter import ShardedParameter


def sharded_parameters(model: nn.Module) -> dict[int, ShardedParameter]:
    """The engine's object of each parameter, by the parameter's id."""
    return {id(parameter.sharded): parameter for parameter in engine_of(model).parameters}


def read_whole(model: nn.Module, value: ShardedParameter | torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A whole tensor on the CPU: a sharded one in `dtype`, by default the compute dtype; any other unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    ((_, whole),) = engine_of(model).full_parameters([value.shard])
    return whole.cpu().to(dtype or whole.dtype)
