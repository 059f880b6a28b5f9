"""The microbatches of one rank: when a forward or a backward of its model runs, and of which minibatch it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..base.errors import describe
from .backward_end import tensors_in
from .unit import in_backward_pass

if TYPE_CHECKING:
    from .engine import Engine


class Microbatches:
    """What units and parameters report of forwards and backwards; `count` of them ended in this minibatch.

    A forward outside of a minibatch waits for what the owners publish, a backward there is refused. What can't be
    right in the end fails the minibatch. Each microbatch looks whether the ranks of this replica live, so that a death
    is known long before the exit.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.count = 0
        self.in_backward = False
        self._graph_is_kept = False  # the backward makes a graph, for one of its own
        self._forwards = 0  # units whose forward runs now, nested ones counted
        self._forward_start_s = self._backward_start_s = 0.0
        self._loss_start_s: float | None = None  # a forward ended there and its backward has not begun

    @property
    def in_forward(self) -> bool:
        return self._forwards > 0

    def forward_begins(self) -> None:
        engine = self._engine
        self._forwards += 1
        if self._forwards > 1 or in_backward_pass():  # a nested unit, or a recomputation of checkpointing
            return
        if self.in_backward:
            self._stop_early()
        try:
            if engine.is_open:
                engine.events.microbatch = self.count
                engine.require_replica(f"the shards of all ranks in minibatch {engine.minibatch}")
            else:
                engine.publication.wait_readable()
        except BaseException:
            self._forwards -= 1
            raise
        engine.computes_here()
        self._forward_start_s = time.monotonic()

    def forward_ends(self, error: BaseException | None) -> None:
        engine = self._engine
        self._forwards -= 1
        if self._forwards or in_backward_pass():
            return
        now_s = time.monotonic()
        engine.events.add("forward", self._forward_start_s, now_s)
        backward_follows = engine.is_open and torch.is_grad_enabled() and error is None
        self._loss_start_s = now_s if backward_follows else None
        if not backward_follows:
            engine.prefetch.expect_nothing()
        if error is not None:
            if engine.is_open:
                engine.fail(describe(error))
        elif not engine.is_open:
            engine.drain("reading the parameters")
            engine.publication.check_not_torn()

    def watch_backward(self, output: Any, of_unit: Callable[[], None] | None) -> bool:
        """Has the output's tensors say when their backward begins; `of_unit` is then called too.

        Returns whether a backward through them may follow.
        """
        if not torch.is_grad_enabled():
            return False
        number = self._engine.minibatch if self._engine.is_open else None

        def begins(_: torch.Tensor) -> None:
            self.backward_begins(number)
            if of_unit is not None:
                of_unit()

        # A leaf that is passed through outlives the minibatch, a hook on it too.
        watched = [value for value in tensors_in(output) if value.grad_fn is not None]
        for value in watched:
            value.register_hook(begins)
        return bool(watched) and (self._engine.is_open or in_backward_pass())

    def backward_begins(self, number: int | None) -> None:
        """A backward that belongs to a forward of minibatch `number` runs; None: of none."""
        engine = self._engine
        engine.refuse_in_child("a backward")
        self._graph_is_kept = torch.is_grad_enabled()
        if self.in_backward:
            return
        if not engine.is_open:
            raise RuntimeError("backward outside of a minibatch: put it into `with minibatch(model):`")
        if number != engine.minibatch:
            engine.fail("a backward belonged to a forward outside of the minibatch")
            raise RuntimeError(
                f"this backward belongs to a forward outside of minibatch {engine.minibatch}: the parameters have "
                f"changed since. Run forward and backward of a microbatch in one minibatch."
            )
        self.in_backward = True
        self._backward_start_s = time.monotonic()
        if self._loss_start_s is not None:
            engine.events.add("forward", self._loss_start_s, self._backward_start_s, label="loss")
            self._loss_start_s = None
        for unit in engine.units:  # checkpointing may recompute any part of any unit
            unit.make_whole()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._engine.events.add("backward", self._backward_start_s, time.monotonic())
        self.count += 1
        self._stop_backward()

    def stop(self) -> None:
        """The minibatch ends: what has not ended is not waited for."""
        if self.in_backward:
            self._stop_early()
        else:
            self._stop_backward()
        self._forwards = 0

    def _stop_early(self) -> None:
        self._engine.fail("a backward began and did not end")
        self._stop_backward()

    def _stop_backward(self) -> None:
        self.in_backward = False
        self._engine.prefetch.expect_nothing()
        for unit in self._engine.units:
            unit.make_sharded()
            if not self._graph_is_kept:
                unit.let_go()
