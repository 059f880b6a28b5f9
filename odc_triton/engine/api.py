"""The calls of a training loop on a sharded model: minibatch, publish, full_parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .engine import Engine
from .module import ODCModule
from .protocol import Protocol


def engine_of(module: nn.Module, call: str = "this call") -> Engine:
    """The engine behind a module that `fully_shard` returned. `call`: for whom, in messages."""
    if not isinstance(module, ODCModule):
        if getattr(module, "_odc_engine", None) is not None:
            raise TypeError(
                f"{type(module).__name__} was sharded by torch's fully_shard, and {call} needs a model of "
                f"odc_triton.fully_shard, which takes the same mesh: it is built on that model's own units, not on "
                f"FSDP2's. use_odc makes minibatch, publish and full_parameters work on it"
            )
        raise TypeError(
            f"{type(module).__name__} is not sharded: call fully_shard(model) first, and give what it returns"
        )
    return module._odc_engine


def _protocol_of(module: nn.Module) -> Protocol:
    """The engine behind a module that `fully_shard` or `use_odc` returned."""
    return getattr(module, "_odc_engine", None) or engine_of(module)


class minibatch:
    """One optimizer step's microbatches of this rank, any number of them.

        with minibatch(model, tokens=count(packs)) as mb:
            for pack in packs:
                (summed_loss(model, pack) / mb.tokens).backward()

    `tokens`: this rank's target tokens; `mb.tokens` is then their sum over all ranks and gradients are summed.
    Without it gradients are divided by the world size, as FSDP2 does, and `mb.tokens` raises RuntimeError. Give it
    on all ranks or on none. `split`: `packs.split`, the plan of packs that hold pieces of sequences (`enable_split`).

    Enter: waits until every rank's parameters are readable and its gradient shards are zero. Exit: waits until
    every rank's gradients are reduced; `p.grad` is then this rank's shard of the sum, or None on all ranks if no
    rank touched p. Inside, ranks never wait for each other.

    Raises MinibatchFailed on every rank if a microbatch raised on any; RankLost if a peer's process is gone;
    DeadlineExceeded if a live peer is later than the `timeout` of fully_shard.
    """

    def __init__(self, model: nn.Module, tokens: int | None = None, *, split: Any = None) -> None:
        self._engine = _protocol_of(model)
        self._given = {"tokens": tokens, "split": split}
        self._tokens: int | None = None
        self.index: int | None = None  # the number of this minibatch, from 0, the same on every rank

    def __enter__(self) -> minibatch:
        self._engine.begin(**self._given)
        self._tokens, self.index = self._engine.tokens.total, self._engine.number
        return self

    @property
    def tokens(self) -> int:
        """The target tokens of all ranks together. Raises RuntimeError if no rank gave its own, or before entry."""
        if self._tokens is None:
            raise RuntimeError(
                "mb.tokens is not known: give this rank's number of target tokens, minibatch(model, tokens=…), and "
                "read it inside the `with` block"
            )
        return self._tokens

    def divide_by(self, number: float) -> None:
        """Divides the sums of the gradients by `number`, above 0, at the exit: for a mean whose denominator is known
        only inside. Call it there, on all ranks, with the same number. Raises ValueError for 0 or less, RuntimeError
        outside.
        """
        if self._engine.number != self.index or not self._engine.is_open:
            raise RuntimeError("divide_by outside of its minibatch: call it inside of the `with` block")
        if not 0 < number < math.inf:
            raise ValueError(f"divide_by has {number!r}; give a finite number above 0")
        self._engine.tokens.late_divisor = float(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.end(error)


def begin_minibatch(model: nn.Module, tokens: int | None = None, *, split: Any = None) -> minibatch:
    """Enters a minibatch where a `with` block can't be used; `end_minibatch(model)` leaves it."""
    return minibatch(model, tokens, split=split).__enter__()


def end_minibatch(model: nn.Module, error: BaseException | None = None) -> None:
    """Leaves the minibatch that `begin_minibatch` entered. `error`: what a microbatch raised, if anything."""
    _protocol_of(model).end(error)


def publish(model: nn.Module) -> None:
    """Makes changes to the parameters readable by peers; call it on every rank.

    Only needed after writing parameters by hand (an EMA, `dcp.load` in place): optimizer steps and
    `load_state_dict` publish too. Before writing, make sure by a barrier that no other rank is still
    evaluating: fp32 parameters are read where they are written. Processes outside of the job that read them
    (`read_policy`) do not notice such writes before this call. Several replicas exchange what was written here; until
    then the others don't see it.
    """
    _protocol_of(model).publish()


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every parameter, in the compute dtype, one copy at a time.

    Any single rank may call it: reads are one-sided. After an optimizer step it waits, with the deadline, until
    every owner has stepped. Raises RuntimeError if an owner steps again while this rank is still reading.
    """
    yield from _protocol_of(model).full_parameters()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name(...)` see whole parameters, as its forward does. FSDP2's function of that name.

    A module that is not a unit is left alone, as FSDP2 leaves it.
    """
    if not isinstance(module, ODCModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__} has no method {method_name!r}")
    setattr(module, method_name, module._odc_unit.wrap_method(method))
