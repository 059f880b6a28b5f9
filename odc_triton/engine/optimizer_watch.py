"""Listens to optimizers that step an engine's parameters, so that users need not call anything.

Each rank steps its shards with its own learning rate and the like, so these must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.errors import RanksDiffer
from .parameter import ShardedParameter

COMPARED = ("lr", "momentum", "betas", "eps", "weight_decay")


class Hyperparameters:
    """The hyperparameters of this rank's optimizer steps since the last minibatch began.

    Numbers only: a tensor may be on a device, and reading it would wait for the device. And only the names in
    COMPARED: some optimizers keep running sums over their own shards in their groups.
    """

    def __init__(self) -> None:
        self._steps: list[list[dict[str, list[float]]]] = []

    def note(self, optimizer: Optimizer) -> None:
        groups = [{name: _numbers(group.get(name)) for name in COMPARED} for group in optimizer.param_groups]
        self._steps.append(groups)

    def digest(self) -> str | None:
        """A short digest for peers, however many groups there are; None if nothing was stepped."""
        return hashlib.sha256(repr(self._steps).encode()).hexdigest()[:16] if self._steps else None

    def compare(
        self, digests: list[str | None], exchange: Callable[[str, dict[str, Any]], list[dict[str, Any]]]
    ) -> None:
        """Forgets the steps. `digests`: all ranks'; if they differ, the steps are exchanged.

        Raises RanksDiffer, on all ranks, with the first difference.
        """
        steps, self._steps = self._steps, []
        if len(set(digests)) < 2:
            return
        messages = exchange("compare the optimizers' hyperparameters", {"steps": steps})
        stepped = [theirs["steps"] for theirs in messages]
        _require_same(
            [[len(each)] for each in stepped], "optimizer.step() was called, since the last minibatch,", "times"
        )
        for at in zip(*stepped, strict=True):
            for number, groups in enumerate(zip(*at, strict=False)):
                for name in COMPARED:
                    values = [group[name] for group in groups]
                    _require_same(values, f"the optimizer's {name} (parameter group {number}) is")


def _require_same(values: Sequence[list[float]], what: str, unit: str = "") -> None:
    """Raises RanksDiffer if ranks have different `values` of `what`, each in `unit`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(" ".join([", ".join(map(str, value)), unit]).strip(), []).append(rank)
    if len(ranks) > 1:
        said = "; ".join(f"{value} on ranks {those}" for value, those in ranks.items())
        raise RanksDiffer(
            f"{what} {said}. Each rank steps its own shards: call step() on all ranks or on none, with the same "
            f"values, and start again from the last checkpoint"
        )


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return list(values) if all(isinstance(each, (int, float)) for each in values) else []


class Stepped(Protocol):
    """The owner of stepped parameters: an engine."""

    parameters: Sequence[ShardedParameter]
    hyperparameters: Hyperparameters

    def originals(self) -> Iterable[tuple[nn.Parameter, ShardedParameter]]: ...

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
    mine = {id(each) for parameter in engine.parameters for each in parameter.optimized}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _refuse_originals(optimizer: Optimizer, engine: Stepped) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for original, parameter in engine.originals():
        if id(original) in stepped:
            raise RuntimeError(
                f"this optimizer holds {parameter.name} as it was before fully_shard: its steps change nothing. "
                f"Make the optimizer after fully_shard, from model.parameters()."
            )
