"""A unit's forward: what goes in and comes out of it, and how it notices where its backward begins and ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from .unit import Passes, Unit, in_backward_pass

_Kinds = tuple[type, ...]
_NO_CONTAINERS = (torch.Tensor, bool, int, float, str, type(None))


def run_forward(unit: Unit, call: Callable, args: tuple, kwargs: dict) -> Any:
    """`call(*args, **kwargs)` as a forward of the unit.

    It is called in place of the module's `__call__`, as an interrupt would skip forward hooks.
    """
    unit.forward_begins()
    try:
        unit.prepare()
        policy = unit.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _map(partial(_cast, dtype=policy.param_dtype), (args, kwargs))
        if unit.gathered:
            unit.passes.prefetch.needs(unit, in_backward=in_backward_pass())
            if torch.is_grad_enabled() and unit.uses == 1:
                args, values = watch_end_of_backward(unit.backward_ends, (args, tuple(kwargs.values())))
                kwargs = dict(zip(kwargs, values, strict=True))
        output = call(*args, **kwargs)
        if policy.output_dtype is not None:
            output = _map(partial(_cast, dtype=policy.output_dtype), output)
        if unit.gathered:
            output = _map(lambda value: _own(value, unit), output)
        watched = watch_backward(unit.passes, output, unit.backward_begins if unit.gathered else None)
    except BaseException as error:
        # A recomputation may stop early by an exception.
        unit.forward_ends(error, backward_follows=in_backward_pass())
        raise
    unit.forward_ends(None, backward_follows=watched)
    return output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _own(value: Any, unit: Unit) -> Any:
    """Copies an output that is a view of a parameter, whose memory will be freed."""
    if isinstance(value, torch.Tensor) and any(storage.holds(value) for storage in unit.gathered):
        return value.clone()
    return value


def watch_backward(passes: Passes, output: Any, of_unit: Callable[[], None] | None) -> bool:
    """Hooks the output's tensors to report when their backward begins; `of_unit` is then called too.

    Returns whether a backward through them may follow.
    """
    if not torch.is_grad_enabled():
        return False
    protocol = passes.protocol
    number = protocol.number if protocol.is_open else None

    def begins(_: torch.Tensor) -> None:
        passes.backward_begins(number)
        if of_unit is not None:
            of_unit()

    # A leaf that is passed through outlives the minibatch, and so would a hook on it.
    watched = [value for value in tensors_in(output) if value.grad_fn is not None]
    for value in watched:
        value.register_hook(begins)
    return bool(watched) and (protocol.is_open or protocol.reads_only or in_backward_pass())


class _EndOfBackward(torch.autograd.Function):
    """Passes a unit's inputs through; its backward runs when the unit's is over.

    Of all nodes that are ready, autograd runs the one made last, and this one is made before everything in the unit.
    So whatever is left of the unit's backward then is waiting for a gradient from outside of it.
    """

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ended = ended
        ctx.set_materialize_grads(False)  # an unused input has no gradient, not zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.ended()
        return None, *gradients


@_disable_dynamo  # it would trace the containers for nothing
def watch_end_of_backward(ended: Callable[[], None], arguments: Any) -> Any:
    """The same arguments, with those that get a gradient passed through `_EndOfBackward`; `ended` is then called.

    Lists and dicts, to which a unit may write, keep their identity if a tensor outside of them gets a gradient. If no
    tensor does (token ids), `ended` is not called.
    """
    for kept in ((list, dict), ()):
        inputs = {id(tensor): tensor for tensor in tensors_in(arguments, kept) if tensor.requires_grad}
        if inputs:
            passed = _EndOfBackward.apply(ended, *inputs.values())
            return _replace(arguments, dict(zip(inputs, passed, strict=True)), kept)
    return arguments


def _taken_apart(value: Any) -> tuple[Iterable[Any], Callable[[list[Any]], Any]] | None:
    """The parts of a container, as pytree sees them, and what makes one of other parts; None if it is none.

    For Python's own containers pytree takes many times as long. Its closures form a cycle with `is_leaf`, which
    would keep a `value` that it holds.
    """
    if isinstance(value, _NO_CONTAINERS):
        return None
    if type(value) in (tuple, list):
        return value, type(value)
    if type(value) is dict:
        return value.values(), lambda parts: dict(zip(value, parts, strict=True))
    own = id(value)
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: id(part) != own)
    return None if spec.is_leaf() else (parts, lambda parts: pytree.tree_unflatten(parts, spec))


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """As pytree's `tree_map`."""
    if (apart := _taken_apart(value)) is None:
        return change(value)
    parts, made_of = apart
    return made_of([_map(change, part) for part in parts])


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any, kept: _Kinds = ()) -> Iterator[torch.Tensor]:
    """The tensors in tuples, dataclasses and other containers, except those of the `kept` kinds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, kept):
        return
    elif (apart := _taken_apart(value)) is not None:
        for part in apart[0]:
            yield from tensors_in(part, kept)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), kept)


def _replace(value: Any, tensors: dict[int, torch.Tensor], kept: _Kinds) -> Any:
    """`value` with its tensors replaced, by id of the old; a container that holds none of them is returned as it is."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, kept):
        return value
    if _is_dataclass(value):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        new = {name: _replace(part, tensors, kept) for name, part in old.items()}
        return value if all(new[name] is old[name] for name in old) else dataclasses.replace(value, **new)
    if (apart := _taken_apart(value)) is None:
        return value
    parts, made_of = apart
    replaced = [_replace(part, tensors, kept) for part in parts]
    if all(new is old for new, old in zip(replaced, parts, strict=True)):
        return value
    return made_of(replaced)
