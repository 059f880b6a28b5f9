"""`Optimizer.zero_grad`, noticed: torch has hooks for an optimizer's step, and none for this."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any, Protocol

from torch.optim import Optimizer


class Notices(Protocol):
    """What is told before and after any optimizer's `zero_grad`."""

    def before_zero_grad(self, optimizer: Optimizer) -> None: ...

    def after_zero_grad(self, optimizer: Optimizer) -> None: ...


class _ZeroGrad:
    """`function` is in the place of `Optimizer.zero_grad` while somebody is to be told. It is one, not an object with
    `__get__`, as accelerate asks for its signature.
    """

    def __init__(self) -> None:
        self._plain = plain = Optimizer.zero_grad
        self.told: weakref.WeakSet[Any] = weakref.WeakSet()
        told = self.told

        @wraps(plain)
        def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
            for each in list(told):
                each.before_zero_grad(self)
            plain(self, set_to_none)
            for each in list(told):
                each.after_zero_grad(self)

        self.function = zero_grad
        vars(zero_grad)["odc_noticed"] = self

    def restore(self) -> None:
        if not list(self.told) and vars(Optimizer)["zero_grad"] is self.function:
            Optimizer.zero_grad = self._plain


class Zeroing:
    """Tells `who` from `start` to `stop`, or as long as it lives."""

    def __init__(self, who: Notices) -> None:
        self._who = weakref.ref(who)

    def start(self) -> None:
        current = vars(Optimizer)["zero_grad"]
        noticed = vars(current).get("odc_noticed")
        if noticed is None or noticed.function is not current:  # another wraps it, and has its attributes
            noticed = _ZeroGrad()
            Optimizer.zero_grad = noticed.function
        noticed.told.add(self._who())
        self._end = weakref.finalize(self._who(), noticed.restore)
        self._noticed = noticed

    def stop(self) -> None:
        self._noticed.told.discard(self._who())
        self._noticed.restore()
