"""The values behind a sharded model's parameters, for who writes them into files."""

from __future__ import annotations

import torch
from torch import nn

from ..engine.api import engine_of
from ..engine.parameter import ShardedParameter


def sharded_parameters(model: nn.Module) -> dict[int, ShardedParameter]:
    """What is behind each parameter, by its id."""
    return {id(parameter.sharded): parameter for parameter in engine_of(model).parameters}


def read_whole(model: nn.Module, value: ShardedParameter | torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A whole tensor on the CPU: of its owners, in `dtype` or the compute dtype; of what is not sharded, as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    ((_, whole),) = engine_of(model).full_parameters([value])
    return whole.cpu().to(dtype or whole.dtype)
