"""Optimizer steps: noticed, so that users need not call anything; compared between the ranks.

Each rank steps its shards with its own learning rate and the like, so these must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import inspect
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.errors import RanksDiffer
from .member import Member, Phase
from .minibatch import Participant
from .publication import Publication
from .shard import Shard

_COMPARED = {"lr", "momentum", "betas", "eps", "weight_decay"}
_NOT_COMPARED = {"params", "foreach", "fused", "capturable", "differentiable"}  # other ways to the same values
_LARGEST = 16  # elements of a tensor that is compared


class _Hook:
    """A hook on all optimizers' steps, on behalf of one engine; it does nothing once the engine is gone.

    [Note: hooks of freed engines] torch iterates over its hooks while an optimizer steps, and the garbage collector may
    free an engine then. So an engine's end removes no hook; the next `OptimizerSteps` do.
    """

    def __init__(self, steps: OptimizerSteps, call: Callable[..., Any], register: Any) -> None:
        self._steps, self._call = weakref.ref(steps), call
        self.handle = register(self)
        for hook in list(self.handle.hooks_dict_ref().values()):
            if isinstance(hook, _Hook) and hook._steps() is None:
                hook.handle.remove()

    @_disable_dynamo
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return None if (steps := self._steps()) is None else self._call(steps, optimizer, args, kwargs)


class OptimizerSteps(Participant):
    """The steps of optimizers that hold parameters of `engine`. When the outermost of nested ones ends, as of an
    optimizer of others, the parameters are published. Ranks compare those since the last minibatch began: each group's
    parameters and hyperparameters.

    Not a tensor on a device, as reading it would wait for the device, or a long one. Only what an optimizer takes as
    arguments: some keep running sums over their own shards in their groups. And only parameters of which each rank has
    rows: some optimizers are given no empty ones.

    `before_step`: called first, with what the step is called with; returns what it is called with instead, or None.

    Raises RuntimeError, in the step, for an optimizer that was made before `fully_shard`: it would silently step
    tensors that are not read any more.
    """

    name = "hyperparameters"

    def __init__(self, engine: Member, publication: Publication) -> None:
        self._engine, self._publication = engine, publication
        self._noted: list[list[dict[str, list]]] = []
        self.before_step: Callable[[Optimizer, Any, Any], Any] = lambda optimizer, args, kwargs: None
        self.outermost: int | None = None  # the id of the optimizer whose step is running
        self._start_s = 0.0
        self._hooks = (
            _Hook(self, OptimizerSteps._before, register_optimizer_step_pre_hook),
            _Hook(self, OptimizerSteps._after, register_optimizer_step_post_hook),
        )

    def stop(self) -> None:
        for hook in self._hooks:
            hook.handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        groups = self._stepped(optimizer)
        if not any(groups):
            self._refuse_originals(optimizer)
            return None
        changed = self.before_step(optimizer, args, kwargs)
        for shard in chain.from_iterable(groups):
            if shard.lost and shard.has_gradient:
                raise RuntimeError(
                    f"an optimizer steps {shard.name}, whose gradient of an earlier minibatch is lost (p.grad is of "
                    f"one): step all optimizers after each minibatch, put all microbatches of a step into one, or call "
                    f"zero_grad() before the next minibatch if that gradient is not wanted"
                )
        self._engine.refuse_in_child("an optimizer step")
        if self._engine.is_open:
            raise RuntimeError(
                "optimizer step inside a minibatch: gradients are not reduced and peers are reading the parameters. "
                "Step after the `with minibatch(...)` block."
            )
        if self._engine.is_broken:
            raise RuntimeError("a barrier failed, so gradients are partial: start again from the last checkpoint")
        if self.outermost in (None, id(optimizer)):
            self._start_s = time.monotonic()
            self._publication.announce()
            self.outermost = id(optimizer)
        compared = _arguments(type(optimizer))
        options = [{name: _values(group.get(name)) for name in compared} for group in optimizer.param_groups]
        held = [[each.name for each in group if each.is_everywhere] for group in groups]
        self._noted.append([{"params": names, **group} for names, group in zip(held, options, strict=True)])
        return changed

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = self._stepped(optimizer)
        for shard in chain.from_iterable(groups):
            shard.stepped = True
        if any(groups) and self.outermost == id(optimizer):
            self._engine.events.add("step", self._start_s, time.monotonic(), microbatch=-1)
            self.outermost = None
            self._engine.enter(Phase.READY)
            self._publication.publish(stepped=True)

    def _stepped(self, optimizer: Optimizer) -> list[list[Shard]]:
        """Those of the engine's shards that the optimizer has, by group; of tied ones the first, as p.grad is its."""
        mine = {id(shard.sharded): shard for shard in reversed(self._engine.trainable())}
        return [[mine[id(p)] for p in group["params"] if id(p) in mine] for group in optimizer.param_groups]

    def _refuse_originals(self, optimizer: Optimizer) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for original, parameter in self._engine.originals():
            if id(original) in stepped:
                raise RuntimeError(
                    f"this optimizer holds {parameter.name} as it was before fully_shard: its steps change nothing. "
                    f"Make the optimizer after fully_shard, from model.parameters()."
                )

    def entry(self, given: None) -> str | None:
        """A short digest, however many groups there are; None if nothing was stepped."""
        return hashlib.sha256(repr(self._noted).encode()).hexdigest()[:16] if self._noted else None

    def entered(self, messages: list[str | None]) -> None:
        """Forgets the steps. Raises RanksDiffer, on all ranks, with the first difference, for which they exchange the
        steps themselves.
        """
        steps, self._noted = self._noted, []
        if len(set(messages)) < 2:
            return
        everyones = self._engine.exchange("compare the optimizers' hyperparameters", {"steps": steps})
        stepped = [theirs["steps"] for theirs in everyones]
        _require_same(
            [[len(each)] for each in stepped], "optimizer.step() was called, since the last minibatch,", "times"
        )
        for at in zip(*stepped, strict=True):
            _require_same([[len(groups)] for groups in at], "the optimizer has", "parameter groups")
            for number, groups in enumerate(zip(*at, strict=True)):
                everywhere = set.intersection(*(set(group["params"]) for group in groups))
                only = [[name for name in group["params"] if name not in everywhere] for group in groups]
                _require_same(only, f"the optimizer's parameter group {number} also has", "of the parameters")
                for name in sorted(set().union(*groups)):
                    values = [group.get(name, []) for group in groups]
                    _require_same(values, f"the optimizer's {name} (parameter group {number}) is")


def _require_same(values: Sequence[list], what: str, unit: str = "") -> None:
    """Raises RanksDiffer if ranks have different `values` of `what`, each in `unit`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(" ".join([", ".join(map(str, value)) or "none", unit]).strip(), []).append(rank)
    if len(ranks) > 1:
        said = "; ".join(f"{value} on ranks {those}" for value, those in ranks.items())
        raise RanksDiffer(
            f"{what} {said}. Each rank steps its own shards: call step() on all ranks or on none, with the same "
            f"values, and start again from the last checkpoint"
        )


@cache
def _arguments(optimizer: type[Optimizer]) -> list[str]:
    made = [inspect.signature(each.__init__).parameters for each in optimizer.__mro__ if issubclass(each, Optimizer)]
    return sorted(_COMPARED.union(*made) - _NOT_COMPARED)


def _values(value: Any) -> list[float | str | None]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    found = [*chain.from_iterable(each.flatten().tolist() if _is_small(each) else [each] for each in values)]
    known = all(isinstance(each, (int, float, str, type(None))) for each in found)
    return [float(each) if type(each) is int else each for each in found] if known else []  # 1 is 1.0


def _is_small(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cpu and value.numel() <= _LARGEST
