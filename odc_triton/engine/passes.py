"""Forwards and backwards of one rank's model: when one runs, in which minibatch, and where a unit's ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ..base.errors import describe
from .participant import Participant
from .protocol import Protocol as MinibatchProtocol
from .transport import Waits


def in_backward_pass() -> bool:
    """True while autograd runs a backward in this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Unshards(Protocol):
    """Makes parameters whole while a forward or a backward runs: a unit."""

    def make_whole(self) -> None: ...

    def make_sharded(self) -> None: ...

    def let_go(self) -> None: ...


class Passes(Participant):
    """Tracks forwards and backwards as units and parameters report them; `count`: microbatches ended in this minibatch.

    A forward outside of a minibatch waits for what the owners publish; a backward there is refused. What can't end
    correctly fails the minibatch. Each microbatch checks that the ranks of this replica are alive, so that a death
    is known long before the exit.
    """

    name = "microbatches"

    def __init__(
        self,
        protocol: MinibatchProtocol,
        *,
        owners: Sequence[int],
        units: Sequence[Unshards] = (),
        microbatch_ends: Callable[[], None] = lambda: None,
    ) -> None:
        """`owners`: the ranks of this replica. `units`: all that a backward may need, also those added later.
        `microbatch_ends` is called when a microbatch is over.
        """
        self.protocol, self._owners, self._units = protocol, owners, units
        self._microbatch_ends = microbatch_ends
        self.count = 0
        self._of_ranks: list[int] = []  # `count` of each rank at the last exit
        self.in_backward = False
        self._graph_is_kept = False  # the backward makes a graph, for its own backward
        self._forwards = 0  # units whose forward is running, nested ones included
        self._forward_start_s = self._backward_start_s = 0.0
        self._loss_start_s: float | None = None  # a forward ended there and its backward has not begun

    def entry(self, given: None) -> None:
        if self.in_forward:
            raise RuntimeError("a minibatch can't begin inside a forward of the model")

    def opened(self) -> None:
        self.count = 0

    def leave(self) -> None:
        """Does not wait for passes that have not ended."""
        if self.in_backward:
            self._stop_early()
        else:
            self._stop_backward()
        self._forwards = 0

    def exit(self) -> int:
        return self.count

    def settle(self, messages: list[int] | None) -> None:
        self._of_ranks = messages or []

    def reduced(self) -> None:
        protocol = self.protocol
        if len(set(self._of_ranks)) > 1 and protocol.divides_by_ranks:
            protocol.warn_once(
                "counts",
                f"ranks ran {self._of_ranks} microbatches in minibatch {protocol.number} and gradients are divided by "
                f"the number of ranks; give tokens= to minibatch() and divide the loss by mb.tokens",
            )

    @property
    def in_forward(self) -> bool:
        return self._forwards > 0

    def forward_begins(self) -> None:
        protocol = self.protocol
        self._forwards += 1
        if self._forwards > 1 or in_backward_pass():  # a nested unit, or a recomputation of checkpointing
            return
        if self.in_backward:
            self._stop_early()
        try:
            if protocol.is_open:
                protocol.events.microbatch = self.count
                protocol.require_alive(self._owners, f"the shards of all ranks in minibatch {protocol.number}")
            else:
                protocol.publication.wait_readable()
        except BaseException:
            self._forwards -= 1
            raise
        protocol.streams.computes_here()
        self._forward_start_s = time.monotonic()

    def forward_ends(self, error: BaseException | None) -> None:
        protocol = self.protocol
        self._forwards -= 1
        if self._forwards or in_backward_pass():
            return
        now_s = time.monotonic()
        protocol.events.add("forward", self._forward_start_s, now_s)
        backward_follows = protocol.is_open and torch.is_grad_enabled() and error is None
        self._loss_start_s = now_s if backward_follows else None
        if not backward_follows:
            self._microbatch_ends()
        if error is not None:
            if protocol.is_open:
                protocol.fail(describe(error))
        elif not protocol.is_open:
            protocol.streams.drain("reading the parameters")
            protocol.publication.check_not_torn()

    def watch_backward(self, output: Any, of_unit: Callable[[], None] | None) -> bool:
        """Hooks the output's tensors to report when their backward begins; `of_unit` is then called too.

        Returns whether a backward through them may follow.
        """
        if not torch.is_grad_enabled():
            return False
        number = self.protocol.number if self.protocol.is_open else None

        def begins(_: torch.Tensor) -> None:
            self.backward_begins(number)
            if of_unit is not None:
                of_unit()

        # A leaf that is passed through outlives the minibatch, and so would a hook on it.
        watched = [value for value in tensors_in(output) if value.grad_fn is not None]
        for value in watched:
            value.register_hook(begins)
        return bool(watched) and (self.protocol.is_open or in_backward_pass())

    def backward_begins(self, number: int | None) -> None:
        """A backward of a forward in minibatch `number` is running; None: of one outside of minibatches."""
        protocol = self.protocol
        self._graph_is_kept = torch.is_grad_enabled()
        if self.in_backward:
            return
        protocol.refuse_in_child("a backward")
        if not protocol.is_open:
            raise RuntimeError("backward outside of a minibatch: put it into `with minibatch(model):`")
        if number != protocol.number:
            protocol.fail("a backward belonged to a forward outside of the minibatch")
            raise RuntimeError(
                f"this backward belongs to a forward outside of minibatch {protocol.number}: the parameters have "
                f"changed since. Run forward and backward of a microbatch in one minibatch."
            )
        self.in_backward = True
        self._backward_start_s = time.monotonic()
        if self._loss_start_s is not None:
            protocol.events.add("forward", self._loss_start_s, self._backward_start_s, label="loss")
            self._loss_start_s = None
        for unit in self._units:  # checkpointing may recompute any part of any unit
            unit.make_whole()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def gradient_comes(self) -> None:
        """A backward has made a gradient. Raises RuntimeError if none is allowed now."""
        self.backward_begins(self.protocol.number)

    def waited(self, name: str, waits: Waits) -> None:
        """Adding the gradient of `name` had to wait for other ranks at these times."""
        for start_s, end_s in waits:
            self.protocol.events.add("wait", start_s, end_s, label=f"lock of {name}")

    def _backward_ends(self) -> None:
        self.protocol.events.add("backward", self._backward_start_s, time.monotonic())
        self.count += 1
        self._stop_backward()

    def _stop_early(self) -> None:
        self.protocol.fail("a backward began and did not end")
        self._stop_backward()

    def _stop_backward(self) -> None:
        self.in_backward = False
        self._microbatch_ends()
        for unit in self._units:
            unit.make_sharded()
            if not self._graph_is_kept:
                unit.let_go()


_Kinds = tuple[type, ...]


class _EndOfBackward(torch.autograd.Function):
    """Passes a unit's inputs through; its backward runs when the unit's is over.

    Of all nodes that are ready, autograd runs the one made last, and this one is made before everything in the unit.
    So whatever is left of the unit's backward then is waiting for a gradient from outside of it.
    """

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ended = ended
        ctx.set_materialize_grads(False)  # an unused input has no gradient, not zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.ended()
        return None, *gradients


@torch._disable_dynamo  # it would trace the containers for nothing
def watch_end_of_backward(ended: Callable[[], None], arguments: Any) -> Any:
    """The same arguments, with those that get a gradient passed through `_EndOfBackward`; `ended` is then called.

    Lists and dicts, to which a unit may write, keep their identity if a tensor outside of them gets a gradient. If no
    tensor does (token ids), `ended` is not called.
    """
    for kept in ((list, dict), ()):
        inputs = {id(tensor): tensor for tensor in tensors_in(arguments, kept) if tensor.requires_grad}
        if inputs:
            passed = _EndOfBackward.apply(ended, *inputs.values())
            return _replace(arguments, dict(zip(inputs, passed, strict=True)), kept)
    return arguments


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any, kept: _Kinds = ()) -> Iterator[torch.Tensor]:
    """The tensors in tuples, dataclasses and other containers, except those of the `kept` kinds."""
    for part in pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, kept)):
        if isinstance(part, torch.Tensor):
            yield part
        elif _is_dataclass(part):
            yield from tensors_in(tuple(getattr(part, field.name) for field in dataclasses.fields(part)), kept)


def _replace(value: Any, tensors: dict[int, torch.Tensor], kept: _Kinds) -> Any:
    """`value` with its tensors replaced, by id of the old; a container that holds none of them is returned as it is."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, kept):
        return value
    if _is_dataclass(value):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        new = {name: _replace(part, tensors, kept) for name, part in old.items()}
        return value if all(new[name] is old[name] for name in old) else dataclasses.replace(value, **new)
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if spec.is_leaf():
        return value
    replaced = [_replace(part, tensors, kept) for part in parts]
    if all(new is old for new, old in zip(replaced, parts, strict=True)):
        return value
    return pytree.tree_unflatten(replaced, spec)
