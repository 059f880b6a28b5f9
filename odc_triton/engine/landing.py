"""What the optimizer gets of a parameter: nothing inside a minibatch, its gradient after it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .storage import Storage

# What zero_grad(set_to_none=False) calls. There is nothing to zero.
_ZEROING = (torch.Tensor.zero_, torch.Tensor.requires_grad_, torch.Tensor.detach_, torch._foreach_zero_)


class PendingGradient(torch.Tensor):
    """`p.grad` inside a minibatch: it has a shape, dtype and device but no memory, and raises RuntimeError when used.

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


class Landing:
    """`p.grad` of the parameter `sharded`, from the shard that peers have added to.

    `touched`: this rank added to it in this minibatch. `dirty`: some rank did since it was zeroed.
    """

    def __init__(self, sharded: nn.Parameter, storage: Storage) -> None:
        self.sharded, self._storage = sharded, storage
        self._outer_storage = sharded.untyped_storage()  # of the DTensor's shell: empty, but `.data = …` swaps it
        self._landed: DTensor | None = None
        self.touched = self.dirty = False

    @property
    def has_gradient(self) -> bool:
        """Whether the optimizer has one to take."""
        return self.sharded.grad is not None

    def drop(self) -> None:
        """The minibatch failed: there is no gradient, and what some rank may have added is zeroed next."""
        self.sharded.grad = None
        self.dirty = True

    def expect_gradient(self) -> None:
        """Inside a minibatch: using `p.grad` raises."""
        if self.sharded.grad is None and self.sharded.requires_grad:
            self.sharded.grad = self._pending

    def expect_no_more(self) -> bool:
        """The minibatch ends. Returns whether `p.grad` was assigned inside it; that value is dropped."""
        given, self.sharded.grad = self.sharded.grad, None
        return given is not None and given is not self._pending

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradient that the optimizer gets."""
        return self._storage.master.dtype

    @cached_property
    def _pending(self) -> PendingGradient:
        return PendingGradient(self.sharded)

    def own_sum(self) -> torch.Tensor:
        """This rank's part of the sum, to sum over replicas: in its shard, until that is cleared."""
        return self._storage.gradient_part

    def own_gradient(self, own_sum: torch.Tensor) -> torch.Tensor:
        """`own_sum` as a floating-point number, to divide and to step with."""
        exact = self._storage.exact
        return own_sum if exact is None else exact.value(own_sum, self._storage.landed_part)

    def land(self, gradient: torch.Tensor | None) -> None:
        """Hands the landed gradient, of the master's dtype, to the optimizer; None if no rank contributed."""
        self.touched = False
        self.dirty = self.dirty or gradient is not None
        if gradient is None or gradient is not self._storage.landed_part:
            self.sharded.grad = None if gradient is None else self._storage.as_dtensor(gradient)
            return
        if self._landed is None:
            self._landed = self._storage.as_dtensor(gradient)
        self.sharded.grad = self._landed

    def to_clear(self) -> torch.Tensor | None:
        """Drops what the optimizer was handed; returns this rank's gradient shard if it must be zeroed."""
        self.sharded.grad = None
        dirty, self.touched, self.dirty = self.dirty, False, False
        return self._storage.gradient_shard if dirty else None

    def check_memory(self, name: str) -> None:
        """Raises RuntimeError when something replaced the memory under the parameter `name`, as `.double()` does."""
        local = self.sharded._local_tensor
        if (
            local.data_ptr() != self._storage.master.data_ptr()
            or local.dtype != self._storage.master.dtype
            or self.sharded.untyped_storage()._cdata != self._outer_storage._cdata
        ):
            raise RuntimeError(
                f"{name} is no longer in the shared heap: something replaced its storage "
                f"(.data = …, .to(dtype) on a submodule, assign=True). Write into it with copy_() instead."
            )
