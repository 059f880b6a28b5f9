"""The fallback: a parameter's whole tensor, for computations that have no operator here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...base.untyped import untyped
from ..choice import TABLE, Choice, Entry, choose
from ..operand import ShardedOperand, resolve

# Tensor attributes that need elements; all others, and these methods, don't.
_VIEWS = frozenset(("H", "T", "data", "imag", "mH", "mT", "real"))
_KNOWN = frozenset(
    (
        *("dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "ndimension"),
        *("nelement", "numel", "size", "stride", "__hash__", "__len__"),
    )
)


@torch.library.custom_op("odc::whole_weight", mutates_args=())
def _whole(weight: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return resolve(handle).read()


@_whole.register_fake
def _(weight: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


_whole.register_autograd(_backward)


def whole_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` with memory: itself, or a copy read from its owners if it has none."""
    if getattr(weight, "_odc_never_whole", False):
        return read_whole(weight)
    return weight


def read_whole(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a sharded weight; its gradient is the weight's."""
    return torch.ops.odc.whole_weight(weight, handle(weight))


class WholeOnUse(torch.Tensor):
    """A parameter that is never whole, for code unaware of sharding: a computation on it reads it.

    Shape, dtype and the like cost nothing. The gradient is the parameter's.
    """

    _weight: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> WholeOnUse:
        shown = weight.detach().as_subclass(cls)
        shown._weight = weight
        return shown

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        known = name in _KNOWN
        if name in ("__get__", "__set__"):
            known = function.__self__.__name__ not in _VIEWS
        if not known and (name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))):
            raise RuntimeError(f"{name} on a parameter that is never whole would edit a copy: call it on its shards")

        def used(value: WholeOnUse) -> torch.Tensor:
            return value._weight if known else read_whole(value._weight)

        given, named = pytree.tree_map_only(WholeOnUse, used, (args, kwargs or {}))
        return function(*given, **named)


def operand(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.Tensor | None:
    """x as an operator takes it with these parameters; None if plain torch must run, on whole weights:
    if one of them is not sharded, or has another dtype than x (under autocast: than autocast's).
    """
    dtypes = set()
    for parameter in parameters:
        if parameter is not None:
            if getattr(parameter, "_odc_handle", None) is None:
                return None
            dtypes.add(parameter.dtype)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if dtypes != {dtype} or (x.dtype != dtype and not x.is_floating_point()):
        return None
    return x.to(dtype)


def table_of(parameter: torch.Tensor) -> tuple[Entry, ...]:
    """The table of implementations of operators on it."""
    return getattr(parameter, "_odc_table", TABLE)


def handle(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Its handle; see [Note: handles]."""
    return None if parameter is None else untyped(parameter)._odc_handle


def chosen(operator: str, weight: ShardedOperand, tokens: int, device: torch.device, choice: str) -> Choice:
    """The implementation of an operator on this weight for this many tokens."""
    where = {"shape": weight.shape, "tokens": tokens, "device_type": device.type}
    return choose(operator, **where, given=choice, table=weight.table)
