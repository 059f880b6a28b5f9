"""Listens to optimizers that step an engine's parameters, as a user should not have to call anything for it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from .engine import Engine


class OptimizerWatch:
    """Tells `engine` before and after each step of an optimizer that holds its parameters.

    Raises RuntimeError, in the step, for an optimizer that was made before `fully_shard`: it would step tensors that
    nobody reads any more, and say nothing.
    """

    def __init__(self, engine: Engine) -> None:
        watched = weakref.ref(engine)

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (engine := watched()) is not None and _steps(optimizer, engine):
                engine.step_begins()
                engine.hyperparameters.note(optimizer)
            elif engine is not None:
                _refuse_originals(optimizer, engine)

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (engine := watched()) is not None and _steps(optimizer, engine):
                engine.step_ends()

        handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
        self._unhook = [weakref.finalize(engine, handle.remove) for handle in handles]

    def stop(self) -> None:
        for unhook in self._unhook:
            unhook()


def _steps(optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
    mine = {id(parameter.sharded) for parameter in engine.parameters}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _refuse_originals(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for original, parameter in engine.originals():
        if id(original) in stepped:
            raise RuntimeError(
                f"this optimizer holds {parameter.name} as it was before fully_shard: its steps change nothing. "
                f"Make the optimizer after fully_shard, from model.parameters()."
            )
