"""Forwards and backwards of one rank's model: when one runs, in which minibatch, and where a unit's ends.

And what must not run in them: collectives.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.errors import describe
from .state import MinibatchState
from .streams import AllStreams


def in_backward_pass() -> bool:
    """Whether autograd is running a backward in this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Unshards(Protocol):
    """What makes parameters whole while a forward or a backward runs: a unit."""

    def make_whole(self) -> None: ...

    def make_sharded(self) -> None: ...

    def let_go(self) -> None: ...


class Passes:
    """Tracks forwards and backwards as units and parameters report them; `count`: microbatches ended in this minibatch.

    A forward outside of a minibatch waits for what the owners publish; a backward there is refused. What can't end
    correctly fails the minibatch. Each microbatch checks that the ranks of this replica are alive, so that a death
    is known long before the exit.
    """

    def __init__(
        self,
        state: MinibatchState,
        streams: AllStreams,
        units: Sequence[Unshards],
        *,
        owners: Sequence[int],
        nothing_follows: Callable[[], None],
    ) -> None:
        """`units`: all that a backward may need, also those added later. `owners`: the ranks of this replica.
        `nothing_follows` is called when a microbatch is over.
        """
        self.state, self._streams, self._units, self._owners = state, streams, units, owners
        self._nothing_follows = nothing_follows
        self.count = 0
        self.in_backward = False
        self._graph_is_kept = False  # the backward makes a graph, for its own backward
        self._forwards = 0  # units whose forward is running, nested ones included
        self._forward_start_s = self._backward_start_s = 0.0
        self._loss_start_s: float | None = None  # a forward ended there and its backward has not begun

    @property
    def in_forward(self) -> bool:
        return self._forwards > 0

    def forward_begins(self) -> None:
        state = self.state
        self._forwards += 1
        if self._forwards > 1 or in_backward_pass():  # a nested unit, or a recomputation of checkpointing
            return
        if self.in_backward:
            self._stop_early()
        try:
            if state.is_open:
                state.events.microbatch = self.count
                state.require_alive(self._owners, f"the shards of all ranks in minibatch {state.number}")
            else:
                state.publication.wait_readable()
        except BaseException:
            self._forwards -= 1
            raise
        self._streams.computes_here()
        self._forward_start_s = time.monotonic()

    def forward_ends(self, error: BaseException | None) -> None:
        state = self.state
        self._forwards -= 1
        if self._forwards or in_backward_pass():
            return
        now_s = time.monotonic()
        state.events.add("forward", self._forward_start_s, now_s)
        backward_follows = state.is_open and torch.is_grad_enabled() and error is None
        self._loss_start_s = now_s if backward_follows else None
        if not backward_follows:
            self._nothing_follows()
        if error is not None:
            if state.is_open:
                state.fail(describe(error))
        elif not state.is_open:
            self._streams.drain("reading the parameters")
            state.publication.check_not_torn()

    def watch_backward(self, output: Any, of_unit: Callable[[], None] | None) -> bool:
        """Hooks the output's tensors to report when their backward begins; `of_unit` is then called too.

        Returns whether a backward through them may follow.
        """
        if not torch.is_grad_enabled():
            return False
        number = self.state.number if self.state.is_open else None

        def begins(_: torch.Tensor) -> None:
            self.backward_begins(number)
            if of_unit is not None:
                of_unit()

        # A leaf that is passed through outlives the minibatch, and so would a hook on it.
        watched = [value for value in tensors_in(output) if value.grad_fn is not None]
        for value in watched:
            value.register_hook(begins)
        return bool(watched) and (self.state.is_open or in_backward_pass())

    def backward_begins(self, number: int | None) -> None:
        """A backward of a forward in minibatch `number` is running; None: of one outside of minibatches."""
        state = self.state
        state.refuse_in_child("a backward")
        self._graph_is_kept = torch.is_grad_enabled()
        if self.in_backward:
            return
        if not state.is_open:
            raise RuntimeError("backward outside of a minibatch: put it into `with minibatch(model):`")
        if number != state.number:
            state.fail("a backward belonged to a forward outside of the minibatch")
            raise RuntimeError(
                f"this backward belongs to a forward outside of minibatch {state.number}: the parameters have "
                f"changed since. Run forward and backward of a microbatch in one minibatch."
            )
        self.in_backward = True
        self._backward_start_s = time.monotonic()
        if self._loss_start_s is not None:
            state.events.add("forward", self._loss_start_s, self._backward_start_s, label="loss")
            self._loss_start_s = None
        for unit in self._units:  # checkpointing may recompute any part of any unit
            unit.make_whole()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self.state.events.add("backward", self._backward_start_s, time.monotonic())
        self.count += 1
        self._stop_backward()

    def stop(self) -> None:
        """The minibatch ends: does not wait for what has not ended."""
        if self.in_backward:
            self._stop_early()
        else:
            self._stop_backward()
        self._forwards = 0

    def _stop_early(self) -> None:
        self.state.fail("a backward began and did not end")
        self._stop_backward()

    def _stop_backward(self) -> None:
        self.in_backward = False
        self._nothing_follows()
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


# The namespaces of collectives in `torch.ops`.
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_HARMLESS = ("wait_tensor", "_wrap_tensor_autograd")


class RefuseCollectives(TorchDispatchMode):
    """`fully_shard(..., debug=True)`: raises at any collective over more than one rank, as some may never join it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:  # let DTensor go first: it issues its collectives under this mode
            return NotImplemented
        if func.namespace in _NAMESPACES and func._opname not in _HARMLESS and self._ranks_of(args) != 1:
            raise RuntimeError(
                f"collective {func._opname} inside a minibatch: ranks may run different numbers of microbatches, so "
                f"some would never come. Reduce metrics after the minibatch instead."
            )
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _ranks_of(args: tuple) -> int | None:
        import torch.distributed as dist

        for argument in reversed(args):  # the group comes last among the strings, after the reduction's name
            if isinstance(argument, str):  # functional collectives name their group
                return dist.distributed_c10d._resolve_process_group(argument).size()
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except (AttributeError, RuntimeError, TypeError):
                continue
        return None
