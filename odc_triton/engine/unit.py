"""A unit: a module whose parameters are whole together, while its forward or a backward runs.

And which unit is prefetched: the one that came next in the last microbatch.

[Note: edits] Other ranks read the parameters inside a minibatch. Autograd's version counters show an edit of a
parameter, of its local shard, or of the whole tensor in a forward. They don't show one through `.data`, or by
`torch._foreach_*` on DTensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from .gathered import GatheredParameters
from .parameter import ShardedParameter
from .participant import Participant
from .passes import Passes, in_backward_pass, watch_end_of_backward


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in the module tree where a parameter is registered. Tied parameters have several."""

    module: nn.Module
    attribute: str
    parameter: ShardedParameter

    def put(self, value: nn.Parameter) -> None:
        # Modules such as nn.LSTM override __setattr__ to keep lists of their weights: they must see it.
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = value
        else:
            setattr(self.module, self.attribute, value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


class Prefetch:
    """Fills a unit that is needed, and starts filling the one that came after it in the last microbatch: a wrong guess
    costs only time.

    `lock` guards which units are whole: evaluations may run in several threads.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._followed_by: dict[tuple[bool, Unit], tuple[bool, Unit]] = {}  # (in a backward, unit), the last time
        self._last: tuple[bool, Unit] | None = None  # in this microbatch
        self._ahead: Unit | None = None  # fetched, not needed yet

    def needs(self, unit: Unit, *, in_backward: bool) -> None:
        """From here on, computation finds the whole tensors of `unit` filled."""
        with self.lock:
            unit.fetch()
            if self._ahead is unit:
                self._ahead = None
            self._let_go_ahead()
            step, last = (in_backward, unit), self._last
            if last is not None and last != step:
                self._followed_by[last] = step
            self._last, following = step, self._followed_by.get(step)
            unit.wait()
            if following is not None and not following[1].is_fetched:
                self._ahead = following[1]
                self._ahead.fetch()

    def _let_go_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.let_go()

    def microbatch_ends(self) -> None:
        """Forgets its last unit: the next one does not follow it."""
        with self.lock:
            self._let_go_ahead()
            self._last = None


class Unit:
    """Swaps the sharded DTensors of its slots for the whole tensors and back, around the module's forward.

    It swaps the whole *unit*, never single layers, as parents read their children's weights
    (`nn.TransformerEncoderLayer` does). A swap costs a few dictionary entries.

    `gathered`: the storages of its whole tensors, including those of parameters tied into other units; none if whole
    tensors are views of the heap. They are filled for the forward and for the backward, and freed in between unless
    `reshard_after_forward` is False; None is FSDP2's default, False for the root, which is needed again at once.
    """

    def __init__(
        self,
        *,
        name: str,
        module: nn.Module,
        slots: list[Slot],
        policy: MixedPrecisionPolicy,
        passes: Passes,
        prefetch: Prefetch,
        reshard_after_forward: bool | None,
    ) -> None:
        self.name, self.module, self.slots, self.policy = name, module, slots, policy
        self._passes, self._prefetch = passes, prefetch
        self.is_root = name == ""
        self.reshard_after_forward = reshard_after_forward
        storages = [slot.parameter.gathered for slot in slots if slot.parameter.gathered is not None]
        self.gathered: list[GatheredParameters] = list(dict.fromkeys(storages))
        written = _written_in_forward(module)
        parameters = [slot.parameter for slot in slots if (id(slot.module), slot.attribute) not in written]
        self._only_read = [(tensor, parameter) for parameter in parameters for tensor in parameter.versioned()]
        self._versions: list[int] = []
        self._uses = 0  # forwards of this unit that are running
        self._held = False  # by unshard()
        self._whole = False
        for slot in slots:
            slot.put(slot.parameter.sharded)

    def join(self, passes: Passes, prefetch: Prefetch) -> None:
        """A module around this one was sharded: it is no longer a root."""
        self.reset()
        self._passes, self._prefetch, self.is_root = passes, prefetch, False

    def make_whole(self) -> None:
        if not self._whole:
            self._whole = True
            for slot in self.slots:
                slot.put(slot.parameter.leaf)

    def make_sharded(self) -> None:
        """Back to DTensors, unless a forward, a backward or `unshard()` still needs the whole tensors."""
        if self._whole and not (self._uses or self._held or self._passes.in_backward):
            self._whole = False
            for slot in self.slots:
                slot.put(slot.parameter.sharded)

    def check_places(self) -> None:
        """Raises if something registered another parameter in one of the unit's slots."""
        for slot in self.slots:
            registered = slot.module._parameters.get(slot.attribute)
            if registered is not slot.parameter.sharded and registered is not slot.parameter.leaf:
                raise RuntimeError(
                    f"{slot.parameter.name} was replaced by another tensor after fully_shard, as functional_call does: "
                    f"a forward would ignore it. Write its values into the sharded parameter by copy_(), outside of a "
                    f"minibatch"
                )

    def watch_edits(self) -> None:
        """A minibatch begins: from here on parameters are only read."""
        self._versions = [tensor._version for tensor, _ in self._only_read]

    def refuse_edits(self) -> None:
        """Raises RuntimeError if a parameter was edited in place in the open minibatch: see [Note: edits]."""
        for (tensor, parameter), version in zip(self._only_read, self._versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"{parameter.name} was edited in place inside a minibatch, while other ranks read it. Edit "
                    f"parameters after the minibatch, on all ranks, and call publish(model) before the next forward"
                )

    def hold(self) -> None:
        self._held = True
        self.make_whole()
        self.fetch()
        self.wait()
        for slot in self.slots:
            slot.parameter.hold_whole()

    def release(self) -> None:
        self._held = False
        self.make_sharded()
        self.let_go()
        for slot in self.slots:
            slot.parameter.let_go()

    def reset(self) -> None:
        """Forgets `unshard()`, and uses that an interrupt between two lines left open."""
        if self._held or self._uses:
            self._uses = 0
            self.release()

    def fetch(self) -> None:
        """Starts filling the whole tensors."""
        for storage in self.gathered:
            storage.fetch(self, self._passes.protocol.publication.number)

    def expire(self) -> None:
        """Makes the next fetch refill the whole tensors."""
        for storage in self.gathered:
            storage.expire()

    def wait(self) -> None:
        """From here on, computation finds the whole tensors filled."""
        for storage in self.gathered:
            storage.wait()

    def let_go(self) -> None:
        """Frees the whole tensors, unless a forward or `unshard()` still needs them."""
        if not (self._uses or self._held):
            for storage in self.gathered:
                storage.release(self)

    @property
    def is_fetched(self) -> bool:
        """True if it keeps whole tensors for a forward, a backward or `unshard()` already."""
        return any(storage.serves(self) for storage in self.gathered)

    @property
    def _reshards_after_forward(self) -> bool:
        return not self.is_root if self.reshard_after_forward is None else self.reshard_after_forward

    def _own(self, value: Any) -> Any:
        """Copies an output that is a view of a parameter, whose memory will be freed."""
        if isinstance(value, torch.Tensor) and any(storage.holds(value) for storage in self.gathered):
            return value.clone()
        return value

    def _backward_begins(self) -> None:
        self._prefetch.needs(self, in_backward=True)

    def _backward_ends(self) -> None:
        if not torch.is_grad_enabled():  # else it makes a graph, whose own backward needs the parameters again
            self.let_go()

    def run(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """`call(*args, **kwargs)` as a forward of this unit, with its parameters whole.

        It wraps the module's `__call__` rather than using forward hooks, which an interrupt would skip.
        """
        self._passes.forward_begins()
        with self._prefetch.lock:
            self._uses += 1
        try:
            with self._prefetch.lock:  # else another thread would find it whole before all places are
                self.check_places()
                self.make_whole()
            if self._passes.protocol.is_open:
                self.refuse_edits()
            dtype = self.policy.param_dtype
            if dtype is not None and self.policy.cast_forward_inputs:
                args, kwargs = pytree.tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            if self.gathered:
                self._prefetch.needs(self, in_backward=in_backward_pass())
                if torch.is_grad_enabled() and self._uses == 1:
                    args, values = watch_end_of_backward(self._backward_ends, (args, tuple(kwargs.values())))
                    kwargs = dict(zip(kwargs, values, strict=True))
            output = call(*args, **kwargs)
            if self.policy.output_dtype is not None:
                output = pytree.tree_map(lambda value: _cast(value, self.policy.output_dtype), output)
            if self.gathered:
                output = pytree.tree_map(self._own, output)
            watched = self._passes.watch_backward(output, self._backward_begins if self.gathered else None)
        except BaseException as error:
            self._leave(error, backward_follows=in_backward_pass())  # a recomputation may stop early by an exception
            raise
        self._leave(None, backward_follows=watched)
        return output

    def _leave(self, error: BaseException | None, *, backward_follows: bool) -> None:
        with self._prefetch.lock:
            self._uses -= 1
            # After a recomputation its backward follows at once.
            if not (backward_follows and (in_backward_pass() or not self._reshards_after_forward)):
                self.make_sharded()
                self.let_go()
        self._passes.forward_ends(error)

    def wrap_method(self, method: Callable) -> Callable:
        """`method` of the module, run as if it were its forward."""

        @functools.wraps(method)
        def as_forward(*args: Any, **kwargs: Any) -> Any:
            return self.run(method, args, kwargs)

        return as_forward


class Units(Participant):
    """A model's units and parameters between the entry and the exit. Some may be added later.

    `ignored`: the `ignored_params` of `fully_shard`, by id.
    """

    name = "units"

    def __init__(
        self, units: Sequence[Unit], parameters: Sequence[ShardedParameter], ignored: dict[int, nn.Parameter]
    ) -> None:
        self._units, self._parameters, self._ignored = units, parameters, ignored

    def entry(self, given: None) -> None:
        for unit in self._units:
            unit.check_places()
        self._refuse_added()
        for parameter in self._parameters:
            parameter.follow_requires_grad()

    def _refuse_added(self) -> None:
        """Raises for parameters that came after fully_shard: each rank would train its own copy of them."""
        for root in [unit.module for unit in self._units if unit.is_root]:
            known = {id(each) for parameter in self._parameters for each in (parameter.sharded, parameter.leaf)}
            for name, value in root.named_parameters():
                if value.requires_grad and id(value) not in known and id(value) not in self._ignored:
                    raise RuntimeError(
                        f"{name} was added after fully_shard, so its gradient would stay on this rank and the copies "
                        f"would drift apart: add it before (first get_peft_model, then fully_shard), or freeze it"
                    )

    def opened(self) -> None:
        for unit in self._units:
            unit.expire()
            unit.watch_edits()

    def leave(self) -> None:
        for unit in self._units:
            unit.reset()
        for unit in self._units:
            unit.refuse_edits()


def _written_in_forward(root: nn.Module) -> set[tuple[int, str]]:
    """(id of the module, attribute) of parameters that a forward writes, alike on all ranks: nn.Embedding(max_norm=…)
    shortens rows in place. PEFT's wrapper of a bare parameter, as routers and experts have, registers a
    parametrization, which sets the parameter to the storage that it has."""
    modules = list(root.modules())
    shortened = {(id(each), "weight") for each in modules if getattr(each, "max_norm", None) is not None}
    wrappers = [each for each in modules if hasattr(each, "parameter_name") and hasattr(each, "get_base_layer")]
    return shortened | {(id(each.get_base_layer()), each.parameter_name) for each in wrappers}
