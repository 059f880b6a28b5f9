"""Finds the parameters of a module tree: which are tied, where they are registered, which can't be sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from ..engine.parameter import has_gradient_hooks
from ..nn.operand import is_sharded

SHARDABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class FoundParameter:
    """A parameter before it is sharded. `value` is dropped once its values are in the heap."""

    value: nn.Parameter | None
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)  # module, attribute, unit

    @property
    def name(self) -> str:
        return self.names[0]


def refuse_unshardable(name: str, parameter: nn.Parameter, home: str) -> None:
    """Raises ValueError, with the name and the remedy, for a parameter that can't be split over ranks.

    `home`: the type of the device where shards lie.
    """
    kind = type(parameter).__name__
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{name} is a lazy parameter without a shape; run one forward before fully_shard")
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{name} is a DTensor on {parameter.device_mesh}: tensor, context and pipeline parallel models, and models "
            f"that are sharded already, can't be sharded again. Call fully_shard on the plain model."
        )
    if parameter.dtype not in SHARDABLE_DTYPES:
        raise ValueError(
            f"{name} is {kind} of {parameter.dtype}: quantised (4-bit, 8-bit) and complex parameters can't be sharded. "
            f"Load the model in bf16 or fp32, or pass them in ignored_params."
        )
    if parameter.device.type not in ("cpu", "meta", home):
        raise ValueError(
            f"{name} is on {parameter.device}: models are sharded from the CPU, the meta device or {home!r}, where "
            f"their shards lie. Move the model with .cpu() first, or give another mesh or backend."
        )
    if has_gradient_hooks(parameter):
        raise ValueError(
            f"{name} has gradient hooks (optimizer-in-backward registers such hooks): they would never fire on a "
            f"sharded parameter. Remove them and step the optimizer after the minibatch."
        )


def find_parameters(root: nn.Module, unit_names: list[str], ignored: set[nn.Parameter]) -> list[FoundParameter]:
    """All parameters of `root` in registration order, each with every place it is registered at.

    Modules that are sharded already (bottom-up use) are passed over, with all below them. `unit_names`: the
    outermost units; a place outside of all of them belongs to the root, "".
    """
    units = set(unit_names)
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, FoundParameter] = {}

    def visit(module: nn.Module, prefix: str, unit: str) -> None:
        if is_sharded(module):
            return
        if prefix in units:
            unit = prefix
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            entry = found.setdefault(id(parameter), FoundParameter(parameter))
            entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            entry.places.append((module, attribute, unit))
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}.{name}" if prefix else name, unit)

    visit(root, "", "")
    return list(found.values())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
