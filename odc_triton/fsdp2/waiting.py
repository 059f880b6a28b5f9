"""What is in `p.grad` of an automatic model until it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..engine.shard import PendingGradient, Shard

Use = Callable[[int, Any], None]  # of the gradient of a minibatch, by its number, of a parameter, by its shard


class GradientInWaiting(PendingGradient):
    """`p.grad` while the ranks' sum is not made. Whoever uses it makes it, with all ranks, and gets the sum.

    `number`: of the minibatch whose gradient it is. `adds`: to a gradient that was there; else zeroing it changes
    nothing, as `p.grad` would be None. Where no rank has a gradient it acts as zeros.
    """

    use: Use
    number: int
    adds = False
    _is_zeroed = False
    _zeros: torch.Tensor | None = None

    @classmethod
    def of(cls, shard: Shard, use: Use, number: int, *, zeroed: bool) -> GradientInWaiting:
        """`use`: ends that minibatch. `zeroed`: it is of zeros."""
        made: Any = cls(shard)
        made.use, made.number, made.adds = use, number, zeroed
        made.zeroed = zeroed
        return made

    @property
    def zeroed(self) -> bool:
        return self._is_zeroed

    @zeroed.setter
    def zeroed(self, value: bool) -> None:
        self._is_zeroed = value and self.adds

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except _Used:
            return func(*_settled(args), **_settled(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_settled(args), **_settled(kwargs or {}))

    @staticmethod
    def _refuse(*args: Any, **kwargs: Any) -> Any:
        raise _Used

    def __getattr__(self, name: str) -> Any:
        """What a DTensor has and a tensor has not, such as `placements`."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.settled(), name)

    def full_tensor(self, **options: Any) -> Any:
        return self.settled().full_tensor(**options)

    def to_local(self, **options: Any) -> Any:
        return self.settled().to_local(**options)

    def redistribute(self, *args: Any, **options: Any) -> Any:
        return self.settled().redistribute(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.settled().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.settled().clone()

    def __repr__(self) -> str:
        return f"GradientInWaiting(of minibatch {self.number}: using it sums it over the ranks)"

    def settled(self) -> Any:
        """The gradient, once all ranks have ended the minibatch."""
        if (shard := self.shard()) is None:
            raise RuntimeError("the model of this gradient is gone")
        self.use(self.number, shard)
        gradient = shard.sharded.grad
        if gradient is not None and not isinstance(gradient, PendingGradient):
            return gradient
        if self._zeros is None:
            self._zeros = torch.zeros_like(shard.sharded.detach())
        return self._zeros


class _Used(Exception):
    """A gradient was used."""


def _settled(value: Any) -> Any:
    if isinstance(value, GradientInWaiting):
        return value.settled()
    if isinstance(value, dict):
        return {name: _settled(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_settled(each) for each in value)
    return value
