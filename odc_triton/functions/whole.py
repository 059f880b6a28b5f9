"""The generic way: a parameter's whole tensor, for whatever has no operator of its own here."""

from __future__ import annotations

from typing import Any

import torch

from ..handles import resolve


@torch.library.custom_op("odc::whole_weight", mutates_args=(), schema="(Tensor weight, Tensor handle) -> Tensor")
def _whole(weight: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return resolve(handle).read()


@_whole.register_fake
def _(weight: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


_whole.register_autograd(_backward)


def whole_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` with its memory: itself, or a copy read from its owners where it has none."""
    if getattr(weight, "_odc_never_whole", False):
        return torch.ops.odc.whole_weight(weight, weight._odc_handle)
    return weight


def operand(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.Tensor | None:
    """x as an operator takes it beside these parameters; None where plain torch must do it, on whole weights.

    That is where one of them is not sharded or has another dtype, also that which autocast gives x.
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


def handle(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Its handle; see [Note: handles]."""
    return None if parameter is None else parameter._odc_handle
