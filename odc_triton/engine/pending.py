"""`p.grad` inside a minibatch."""

from __future__ import annotations

from typing import Any

import torch

# What zero_grad(set_to_none=False) calls. There is nothing to zero.
_ZEROING = (torch.Tensor.zero_, torch.Tensor.requires_grad_, torch.Tensor.detach_, torch._foreach_zero_)


class PendingGradient(torch.Tensor):
    """It has a shape, dtype and device but no memory, and raises RuntimeError when used.

    None would make `clip_grad_norm_` silently return 0 and clip nothing. `zeroed`: it was zeroed.
    """

    zeroed = False

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> PendingGradient:
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata and zeroing go through; anything else raises."""
        if func in _ZEROING:
            for each in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                each.zeroed |= func in (torch.Tensor.zero_, torch._foreach_zero_)
            return args[0]
        if getattr(func, "__name__", "") == "__get__":  # an attribute; one that computes, such as .T, comes here again
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return cls._refuse()

    @staticmethod
    def _refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "p.grad inside a minibatch: the ranks' gradients are summed at its end. Clip, scale and read gradients "
            "after the `with minibatch(...)` block, before the optimizer step."
        )

    __torch_dispatch__ = full_tensor = to_local = redistribute = _refuse

    def __repr__(self) -> str:
        return "PendingGradient(there is none before the minibatch ends)"
