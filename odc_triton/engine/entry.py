"""Participants that compare the ranks at the entry: target tokens, which parameters train, hyperparameters."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..base.errors import RanksDiffer
from .participant import Participant
from .shard import Shard

COMPARED = ("lr", "momentum", "betas", "eps", "weight_decay")


class Tokens(Participant):
    """`total`: the target tokens of all ranks in the last minibatch that all entered; None if no rank gave its own.

    `divisor`: what gradients are divided by, unless the user chose a factor: losses are divided by the tokens already,
    else by the number of ranks, as FSDP2 does. `late`: by what instead, if given inside the minibatch.
    """

    name = "tokens"

    def __init__(self, world: int) -> None:
        self._world = world
        self.total: int | None = None
        self.late: float | None = None
        self._scope = contextlib.ExitStack()

    @property
    def divisor(self) -> int:
        return self._world if self.total is None else 1

    def entry(self, given: Any) -> int | None:
        """`given`: any integer of at least 0, from Python, numpy or a tensor of one element."""
        if given is None:
            return None
        try:
            count = -1 if isinstance(given, bool) else operator.index(given)
        except TypeError:
            count = -1
        if count < 0:
            raise ValueError(f"tokens is {given!r}; give this rank's number of target tokens, an int of at least 0")
        return count

    def entered(self, messages: list[int | None]) -> None:
        missing = [rank for rank, count in enumerate(messages) if count is None]
        if missing and len(missing) < len(messages):
            raise RanksDiffer(f"tokens was given on some ranks but not on ranks {missing}; give it on all or on none")
        self.total = None if missing else sum(messages)

    def opened(self) -> None:
        self.late = None
        if self.total is not None:
            self._scope.enter_context(_undivided())

    def leave(self) -> None:
        self._scope.close()

    def exit(self) -> float | None:
        return self.late

    def settle(self, messages: list[float | None] | None) -> None:
        if messages is not None and len(set(messages)) > 1:
            raise RanksDiffer(f"by rank, gradients were to be divided by {messages}: call divide_by alike on all ranks")


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Meanwhile `Accelerator.backward` does not divide the loss by `gradient_accumulation_steps`.

    A minibatch with tokens has any number of backwards, whose losses are divided by all ranks' tokens already.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if state is None:
        yield
        return
    options = state().plugin_kwargs  # as the setter of Accelerator.gradient_accumulation_steps does
    steps = options.get("num_steps", 1)
    options["num_steps"] = 1
    try:
        yield
    finally:
        options["num_steps"] = steps


class Trained(Participant):
    """Compares which of the shards require a gradient: one bit each, in hexadecimal."""

    name = "trained"

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    def entry(self, given: None) -> str:
        bits = "".join(str(int(shard.sharded.requires_grad)) for shard in self._shards)
        return f"{int(bits or '0', 2):x}"

    def entered(self, messages: list[str]) -> None:
        if len(set(messages)) < 2:
            return
        masks = [f"{int(mask, 16):0{len(self._shards)}b}" for mask in messages]
        for shard, *bits in zip(self._shards, *masks, strict=True):
            if len(set(bits)) > 1:
                frozen = [rank for rank, bit in enumerate(bits) if bit == "0"]
                raise RanksDiffer(
                    f"{shard.name} is frozen on ranks {frozen} only, so its gradient would lack their part: "
                    f"call requires_grad_() with the same value on all ranks"
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


class OrderOfArrival(Participant):
    """Gradients are added in the order of their arrival: `torch.use_deterministic_algorithms(True)` is refused."""

    name = "order of arrival"

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def entry(self, given: None) -> None:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(self._refusal)
