"""Functions of torch that are noticed while somebody is to be told: torch has hooks for an optimizer's step, and none
for `zero_grad`, nor for the step of zeros by which DCP makes the states of an optimizer that has not stepped.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.optim import Optimizer

ZEROING = ((Optimizer, "zero_grad"), (nn.Module, "zero_grad"))
MAKING_STATES = (dcp, "_init_optim_state")


class _Noticed:
    """`function` is in the place of `owner`'s `name` while somebody is to be told. It is one, not an object with
    `__get__`, as accelerate asks for its signature.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name, self._plain = owner, name, vars(owner)[name]
        self.told: weakref.WeakSet[Any] = weakref.WeakSet()
        plain, told = self._plain, self.told

        @wraps(plain)
        def function(of: Any, *args: Any, **kwargs: Any) -> None:
            for each in list(told):
                getattr(each, f"before_{name.strip('_')}")(of)
            try:
                plain(of, *args, **kwargs)
            finally:
                for each in list(told):
                    getattr(each, f"after_{name.strip('_')}")(of)

        self.function = function
        vars(function)["odc_noticed"] = self

    def restore(self) -> None:
        if not list(self.told) and vars(self._owner)[self._name] is self.function:
            setattr(self._owner, self._name, self._plain)


class Noticing:
    """`who` is told before and after each call of `owner`'s function `name`, with what it is called on, by its methods
    `before_…` and `after_…`: until `stop`, or as long as it lives.
    """

    def __init__(self, who: Any, owner: Any, name: str) -> None:
        current = vars(owner)[name]
        noticed = vars(current).get("odc_noticed")
        if noticed is None or noticed.function is not current:  # another wraps it, and has its attributes
            noticed = _Noticed(owner, name)
            setattr(owner, name, noticed.function)
        noticed.told.add(who)
        weakref.finalize(who, noticed.restore)
        self._who, self._noticed = weakref.ref(who), noticed

    def stop(self) -> None:
        self._noticed.told.discard(self._who())
        self._noticed.restore()
