"""A model's sharded parameters, and their whole values; what fills those that are packed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..base.untyped import untyped
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


def is_packed(layer: nn.Module) -> bool:
    """True for a quantised layer that `nn.packed` has prepared."""
    if "bitsandbytes" not in sys.modules:
        return False
    from ..nn.packed import packed_state

    return packed_state(layer) is not None


def plain_elements(model: nn.Module) -> dict[nn.Parameter, int]:
    """Of each parameter, before bitsandbytes packed it: none of a scale or a code."""
    found = {parameter: parameter.numel() for parameter in model.parameters()}
    for layer in map(untyped, model.modules()):
        weight = layer._parameters.get("original", layer._parameters.get("weight"))
        within = layer[0] if isinstance(layer, ParametrizationList) else weight
        state = getattr(within, "quant_state", getattr(layer, "quant_state", None))
        if weight is not None and state is not None:
            found[weight] = math.prod(state.shape)
        if is_packed(layer):
            found |= {each: 0 for name, each in layer.named_parameters() if "." in name}
    return found


def is_transposed(layer: nn.Module) -> bool:
    """True if its weight is transposed in files: transformers has quantised a Conv1D."""
    return getattr(layer, "source_cls", nn.Linear).__name__ == "Conv1D"


Take = Callable[[slice | None], torch.Tensor]  # returns some rows of a tensor, or with None all of it


class PackedWeight:
    """A quantised layer's weight, which is filled by rows of the plain one. `shape`: in files.

    `steps`: what is done with the rows in turn; before a step begins all ranks have ended the last.
    """

    steps: tuple[Callable[[Take], None], ...]

    def __init__(self, layer: Any, shape: tuple[int, ...]) -> None:
        self._is_transposed = is_transposed(layer)
        self.shape = tuple(shape)[::-1] if self._is_transposed else tuple(shape)

    def rows(self, take: Take) -> Callable[[int, int], torch.Tensor]:
        """What reads rows [start, end) of the weight as the layer has it."""
        if not self._is_transposed:
            return lambda start, end: take(slice(start, end))
        whole = take(None).T
        return lambda start, end: whole[start:end]
