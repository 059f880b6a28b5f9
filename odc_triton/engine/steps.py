"""Optimizer steps: noticed, so that users need not call anything; compared between the ranks; published to readers.

Each rank steps its shards with its own learning rate and the like, so these must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.errors import RanksDiffer
from ..comm.barrier import Barrier
from ..comm.memory.heap import Status, SymmetricHeap
from .minibatch import Participant
from .shard import Shard

COMPARED = ("lr", "momentum", "betas", "eps", "weight_decay")
_POLL_S = 1e-3


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


class Hyperparameters(Participant):
    """Compares the hyperparameters of the ranks' optimizer steps since the last minibatch began.

    Numbers only: a tensor may be on a device, and reading it would wait for the device. And only the names in
    COMPARED: some optimizers keep running sums over their own shards in their groups.
    """

    name = "hyperparameters"

    def __init__(self, exchange: Callable[[str, dict[str, Any]], list[dict[str, Any]]]) -> None:
        self._exchange = exchange
        self._steps: list[list[dict[str, list[float]]]] = []

    def note(self, optimizer: Optimizer) -> None:
        groups = [{name: _numbers(group.get(name)) for name in COMPARED} for group in optimizer.param_groups]
        self._steps.append(groups)

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
