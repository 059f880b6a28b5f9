"""Optimizer steps: noticed, so that users need not call anything; compared between the ranks; published to readers.

Each rank steps its shards with its own learning rate and the like, so these must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.errors import RanksDiffer
from ..comm.barrier import Barrier
from ..comm.memory.heap import Status, SymmetricHeap
from .minibatch import Participant
from .shard import Shard

_COMPARED = {"lr", "momentum", "betas", "eps", "weight_decay"}
_NOT_COMPARED = {"params", "foreach", "fused", "capturable", "differentiable"}  # other ways to the same values
_LARGEST = 16  # elements of a tensor that is compared
_POLL_S = 1e-3


class Stepped(Protocol):
    """The owner of stepped shards: an engine."""

    hyperparameters: Hyperparameters

    @property
    def shards(self) -> Sequence[Shard]: ...

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

    @torch._disable_dynamo
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
    groups = _stepped(optimizer, engine)
    if not any(groups):
        _refuse_originals(optimizer, engine)
        return
    for shard in chain.from_iterable(groups):
        if shard.lost and shard.has_gradient:
            raise RuntimeError(
                f"an optimizer steps {shard.name}, whose gradient of an earlier minibatch is lost (p.grad is of one): "
                f"step all optimizers after each minibatch, put all microbatches of a step into one, or call "
                f"zero_grad() before the next minibatch if that gradient is not wanted"
            )
    engine.step_begins(optimizer)
    engine.hyperparameters.note(optimizer, [[each.name for each in group if each.is_everywhere] for group in groups])


def _after(engine: Stepped, optimizer: Optimizer) -> None:
    groups = _stepped(optimizer, engine)
    for shard in chain.from_iterable(groups):
        shard.stepped = True
    if any(groups):
        engine.step_ends(optimizer)


def _stepped(optimizer: Optimizer, engine: Stepped) -> list[list[Shard]]:
    """Those of the engine's shards that the optimizer has, by group."""
    mine = {id(shard.sharded): shard for shard in reversed(engine.shards)}  # of tied ones the first, as p.grad is its
    return [[mine[id(p)] for p in group["params"] if id(p) in mine] for group in optimizer.param_groups]


def _refuse_originals(optimizer: Optimizer, engine: Stepped) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for original, parameter in engine.originals():
        if id(original) in stepped:
            raise RuntimeError(
                f"this optimizer holds {parameter.name} as it was before fully_shard: its steps change nothing. "
                f"Make the optimizer after fully_shard, from model.parameters()."
            )


class Hyperparameters(Participant):
    """Compares the ranks' optimizer steps since the last minibatch began: each group's parameters and hyperparameters.

    Not a tensor on a device, as reading it would wait for the device, or a long one. Only what an optimizer takes as
    arguments: some keep running sums over their own shards in their groups. And only parameters of which each rank has
    rows: some optimizers are given no empty ones.
    """

    name = "hyperparameters"

    def __init__(self, exchange: Callable[[str, dict[str, Any]], list[dict[str, Any]]]) -> None:
        self._exchange = exchange
        self._steps: list[list[dict[str, list]]] = []

    def note(self, optimizer: Optimizer, names: Sequence[list[str]]) -> None:
        """`names`: of the parameters in each group."""
        compared = _arguments(type(optimizer))
        groups = [{name: _values(group.get(name)) for name in compared} for group in optimizer.param_groups]
        self._steps.append([{"params": held, **group} for held, group in zip(names, groups, strict=True)])

    def entry(self, given: None) -> str | None:
        """A short digest, however many groups there are; None if nothing was stepped."""
        return hashlib.sha256(repr(self._steps).encode()).hexdigest()[:16] if self._steps else None

    def entered(self, messages: list[str | None]) -> None:
        """Forgets the steps. Raises RanksDiffer, on all ranks, with the first difference, for which they exchange the
        steps themselves.
        """
        steps, self._steps = self._steps, []
        if len(set(messages)) < 2:
            return
        everyones = self._exchange("compare the optimizers' hyperparameters", {"steps": steps})
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


class Publication(Participant):
    """This rank's count of publications, which peers wait for outside of a minibatch.

    `number`: publications so far; 0 before the first. `max_lag_s`: how long readers outside of the job may hold the
    next one back.
    """

    name = "publication"

    def __init__(self, heap: SymmetricHeap, barrier: Barrier) -> None:
        self._first, self._barrier = heap.first, barrier
        self.published = Status(heap)  # how many times the rank has published its shards
        self.stepping = Status(heap)  # one more while the rank may be writing its shards
        self.pinned = Status(heap)  # the first rank's: the last publication that such readers let pass; 0: any
        self.max_lag_s = 0.0
        self.check: Callable[[], None] = lambda: None  # raises if such readers would not read what the model is
        self.number = 0
        self._announced = 0
        self._reading = 0  # the publication that an evaluation reads

    def _of_owners(self, status: Status) -> Iterable[tuple[int, int]]:
        """(rank, status) of the owners that this rank reads: those of its own replica."""
        return enumerate(status.seen(), self._first)

    def announce(self) -> None:
        """Announces that this rank may write its shards from here on: readers must not miss it."""
        self.check()
        if self._announced == self.number:
            deadline_s = time.monotonic() + self.max_lag_s
            while 0 < self.pinned.seen()[0] <= self.number and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        self._announced = self.number + 1
        self.stepping.show(self.number + 1)

    def complete(self) -> None:
        """Announces that this rank's shards are readable as they are now."""
        self.number += 1
        self.published.show(self.number)

    def entry(self, given: None) -> int:
        return self.number

    def entered(self, messages: list[int]) -> None:
        """All ranks continue from the highest number, with everything published."""
        self.number = self._announced = max(messages)
        self.published.show(self.number)
        self.stepping.show(self.number)

    def wait_readable(self) -> None:
        """Waits until every owner has published as often as this rank has."""
        mine = self._reading = self.number
        self._barrier.wait_until(
            f"publication {mine} of the parameters",
            lambda: [rank for rank, count in self._of_owners(self.published) if count < mine],
        )

    def check_not_torn(self) -> None:
        """Raises if an owner may have stepped while this rank was reading outside of a minibatch."""
        ahead = [rank for rank, count in self._of_owners(self.stepping) if count > self._reading]
        if ahead:
            raise RuntimeError(
                f"ranks {ahead} stepped or published while rank {self._barrier.rank} was still reading the "
                f"parameters: evaluate after this rank's own optimizer.step(), and call publish(model) on all ranks or "
                f"on none"
            )
