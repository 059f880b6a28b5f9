"""Where a unit's backward ends: noticed at its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Kinds = tuple[type, ...]


class _EndOfBackward(torch.autograd.Function):
    """Passes a unit's inputs through; its backward runs when the unit's is over.

    Autograd runs what was made later first, of all that is ready, and this is made before everything in the unit. So
    whatever of the unit's backward is left then waits for a gradient that comes from outside of it.
    """

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ended = ended
        ctx.set_materialize_grads(False)  # an input that was not used has no gradient, not one of zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.ended()
        return None, *gradients


@torch._disable_dynamo  # which would trace the containers, in vain
def watch_end_of_backward(ended: Callable[[], None], arguments: Any) -> Any:
    """The same arguments, with those that get a gradient passed through `_EndOfBackward`; `ended` is then called.

    Lists and dicts, to which a unit may write, stay themselves if a tensor outside of them gets a gradient. Where none
    does (token ids), nobody is told.
    """
    for kept in ((list, dict), ()):
        inputs = {id(tensor): tensor for tensor in tensors_in(arguments, kept) if tensor.requires_grad}
        if inputs:
            passed = _EndOfBackward.apply(ended, *inputs.values())
            return _replace(arguments, dict(zip(inputs, passed, strict=True)), kept)
    return arguments


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any, kept: _Kinds = ()) -> Iterator[torch.Tensor]:
    """The tensors in tuples, dataclasses and other containers, but for those of the `kept` kinds."""
    for part in pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, kept)):
        if isinstance(part, torch.Tensor):
            yield part
        elif _is_dataclass(part):
            yield from tensors_in(tuple(getattr(part, field.name) for field in dataclasses.fields(part)), kept)


def _replace(value: Any, tensors: dict[int, torch.Tensor], kept: _Kinds) -> Any:
    """`value` with other tensors in it, by id of the old; a container that holds none of them stays itself."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, kept):
        return value
    if _is_dataclass(value):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        new = {name: _replace(part, tensors, kept) for name, part in old.items()}
        return value if all(new[name] is old[name] for name in old) else dataclasses.replace(value, **new)
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if spec.is_leaf():
        return value
    replaced = [_replace(part, tensors, kept) for part in parts]
    if all(new is old for new, old in zip(replaced, parts, strict=True)):
        return value
    return pytree.tree_unflatten(replaced, spec)
