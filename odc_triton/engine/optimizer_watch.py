"""Listens to optimizers that step an engine's parameters, so that users need not call anything.

Each rank steps its shards with its own learning rate and the like, so these must be the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .entry import Hyperparameters
from .shard import Shard


class Stepped(Protocol):
    """The owner of stepped shards: an engine."""

    shards: Sequence[Shard]
    hyperparameters: Hyperparameters

    def originals(self) -> Iterable[tuple[nn.Parameter, Any]]: ...

    def step_begins(self, optimizer: Optimizer) -> None: ...

    def step_ends(self, optimizer: Optimizer) -> None: ...


class _Hook:
    """A hook on all optimizers' steps, on behalf of one engine; it does nothing once the engine is gone.

    [Note: hooks of freed engines] torch iterates over its hooks while an optimizer steps, and the garbage collector may
    free an engine then. So an engine's end removes no hook; the next `OptimizerWatch` does.
    """

    def __init__(self, engine: Stepped, call: Callable[[Stepped, Optimizer], None], register: Callable) -> None:
        self._engine, self._call = weakref.ref(engine), call
        self.handle = register(self)
        for hook in list(self.handle.hooks_dict_ref().values()):
            if isinstance(hook, _Hook) and hook._engine() is None:
                hook.handle.remove()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (engine := self._engine()) is not None:
            self._call(engine, optimizer)


class OptimizerWatch:
    """Tells `engine` before and after each step of an optimizer that holds its parameters.

    Raises RuntimeError, in the step, for an optimizer that was made before `fully_shard`: it would silently step
    tensors that are not read any more.
    """

    def __init__(self, engine: Stepped) -> None:
        self._hooks = (
            _Hook(engine, _before, register_optimizer_step_pre_hook),
            _Hook(engine, _after, register_optimizer_step_post_hook),
        )

    def stop(self) -> None:
        for hook in self._hooks:
            hook.handle.remove()


def _before(engine: Stepped, optimizer: Optimizer) -> None:
    if _steps(optimizer, engine):
        engine.step_begins(optimizer)
        engine.hyperparameters.note(optimizer)
    else:
        _refuse_originals(optimizer, engine)


def _after(engine: Stepped, optimizer: Optimizer) -> None:
    if _steps(optimizer, engine):
        engine.step_ends(optimizer)


def _steps(optimizer: Optimizer, engine: Stepped) -> bool:
    mine = {id(shard.sharded) for shard in engine.shards}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _refuse_originals(optimizer: Optimizer, engine: Stepped) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for original, parameter in engine.originals():
        if id(original) in stepped:
            raise RuntimeError(
                f"this optimizer holds {parameter.name} as it was before fully_shard: its steps change nothing. "
                f"Make the optimizer after fully_shard, from model.parameters()."
            )
