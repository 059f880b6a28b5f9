"""`Optimizer.zero_grad`, noticed: torch has hooks for an optimizer's step, and none for this."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Protocol

from torch.optim import Optimizer


class Notices(Protocol):
    """What is told before and after any optimizer's `zero_grad`."""

    def before_zero_grad(self, optimizer: Optimizer) -> None: ...

    def after_zero_grad(self, optimizer: Optimizer) -> None: ...


class _ZeroGrad:
    """In the place of `Optimizer.zero_grad` while somebody is to be told."""

    def __init__(self) -> None:
        self._plain = Optimizer.zero_grad
        self.told: weakref.WeakSet[Any] = weakref.WeakSet()

    def __get__(self, optimizer: Optimizer | None, kind: type[Optimizer]) -> Any:
        return self if optimizer is None else partial(self, optimizer)

    def __call__(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        for each in list(self.told):
            each.before_zero_grad(optimizer)
        self._plain(optimizer, set_to_none)
        for each in list(self.told):
            each.after_zero_grad(optimizer)

    def restore(self) -> None:
        if not self.told and vars(Optimizer)["zero_grad"] is self:
            Optimizer.zero_grad = self._plain


class Zeroing:
    """Tells `who` from `start` to `stop`, or as long as it lives."""

    def __init__(self, who: Notices) -> None:
        self._who = weakref.ref(who)

    def start(self) -> None:
        noticed = vars(Optimizer)["zero_grad"]
        if not isinstance(noticed, _ZeroGrad):
            noticed = _ZeroGrad()
            Optimizer.zero_grad = noticed  # pyright: ignore[reportAttributeAccessIssue]
        noticed.told.add(self._who())
        self._end = weakref.finalize(self._who(), noticed.restore)
        self._noticed = noticed

    def stop(self) -> None:
        self._noticed.told.discard(self._who())
        self._noticed.restore()
