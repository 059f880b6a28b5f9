"""What `p.grad` is before the gradient has landed."""

from __future__ import annotations

from typing import Any

import torch

# What zero_grad(set_to_none=False) calls. Nothing is there to zero.
_ZEROING = (torch.Tensor.zero_, torch.Tensor.requires_grad_, torch.Tensor.detach_, torch._foreach_zero_)


class PendingGradient(torch.Tensor):
    """`p.grad` inside a minibatch: it has shape, dtype and device, no memory, and raises RuntimeError when it is used.

    None would make `clip_grad_norm_` return 0, clip nothing and say nothing. Zeroing it does nothing.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> PendingGradient:
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata and zeroing go through; anything else raises."""
        if func in _ZEROING:
            return args[0]
        if getattr(func, "__name__", "") == "__get__":  # an attribute; one that computes, as .T, comes here again
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
