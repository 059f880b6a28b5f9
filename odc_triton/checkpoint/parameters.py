"""A model's sharded parameters, and their whole values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..engine.api import engine_of
from ..engine.parameter import ShardedParameter


def sharded_parameters(model: nn.Module) -> dict[int, ShardedParameter]:
    """The engine's object of each parameter, by the parameter's id."""
    return {id(parameter.sharded): parameter for parameter in engine_of(model).parameters}


def read_whole(
    model: nn.Module, value: ShardedParameter | torch.Tensor, dtype: torch.dtype | None, device: Any = "cpu"
) -> torch.Tensor:
    """A copy of a whole tensor: of a sharded one in `dtype`, by default the compute dtype; of any other unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device)
    ((_, whole),) = engine_of(model).publication.full_parameters([value.shard])
    return whole.to(device).to(dtype or whole.dtype)
