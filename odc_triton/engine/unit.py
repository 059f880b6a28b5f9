"""Units: modules whose parameters are whole together, and the forwards and backwards that need them whole.

And which unit is prefetched: the one that came next in the last microbatch.

[Note: edits] Other ranks read the parameters inside a minibatch. Autograd's version counters show an edit of a
parameter, of its local shard, of these in a state dict, or of the whole tensor in a forward. They don't show one
through `.data`, or by `torch._foreach_*` on DTensors. `refuse_edited` in shard.py refuses edits outside of minibatches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Sequence
from enum import IntEnum
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..base.errors import describe
from .gathered import GatheredParameters
from .minibatch import Participant
from .parameter import ShardedParameter, Slot, written_in_forward
from .protocol import Protocol
from .shard import share_versions
from .transport import Waits


def in_backward_pass() -> bool:
    """True while autograd runs a backward in this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


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


class UnitState(IntEnum):
    """What is registered on a unit's modules, and what takes memory in addition to the shards if whole tensors are
    gathered: elsewhere they are views. A unit that is needed for several states is in the last of them.

    SHARDED   DTensors are registered. Whole tensors take memory only if they are prefetched, or if a backward made a
              graph, whose own backward reads them.
    KEPT      Between a forward and its backward, if the unit is not resharded then: as in FORWARD.
    FORWARD   While forwards of it run, whole tensors are registered and take memory.
    BACKWARD  While a backward of the model runs, whole tensors are registered, as checkpointing may recompute any part
              of any unit. They take memory until the backward of the unit ends; if not KEPT, from its beginning on.
    HELD      From `unshard()` to `reshard()` or the end of the minibatch, whole tensors are registered and take
              memory, also those that are otherwise never whole.
    """

    SHARDED, KEPT, FORWARD, BACKWARD, HELD = range(5)


SHARDED, KEPT, FORWARD, BACKWARD, HELD = UnitState


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
        reshard_after_forward: bool | None,
    ) -> None:
        self.name, self.module, self.slots, self.policy = name, module, slots, policy
        self.passes, self.is_root = passes, name == ""
        self.reshard_after_forward = reshard_after_forward
        storages = [slot.parameter.gathered for slot in slots if slot.parameter.gathered is not None]
        self.gathered: list[GatheredParameters] = list(dict.fromkeys(storages))
        written = written_in_forward(module)
        parameters = [slot.parameter for slot in slots if (id(slot.module), slot.attribute) not in written]
        self._only_read = [tensor for parameter in parameters for tensor in parameter.versioned()]
        self._edited_with = [parameter for parameter in parameters for _ in parameter.versioned()]
        self._versions: list[int] = []
        self.divide_factor: float | None = None  # set_gradient_divide_factor
        self.uses = 0  # forwards of it that are running
        self.state = SHARDED
        for slot in slots:
            slot.put(slot.parameter.sharded)
        for each in {id(slot.module): slot.module for slot in slots}.values():
            each.register_state_dict_post_hook(share_versions)

    def join(self, passes: Passes) -> None:
        """A module around this one was sharded: it is no longer a root."""
        self.reset()
        self.passes, self.is_root = passes, False

    def _enter(self, state: UnitState) -> None:
        """The one place where it changes. Raises RuntimeError for one that can't follow: KEPT follows FORWARD alone."""
        before = self.state
        if state is before or (state is KEPT and before is not FORWARD):
            self._refuse(state.name)
        self.state = state
        if before is SHARDED:
            if not self.passes.protocol.is_open:
                self.watch_edits()
            for slot in self.slots:
                slot.put(slot.parameter.leaf)
        elif state is SHARDED:
            for slot in self.slots:
                slot.put(slot.parameter.sharded)

    def make_whole(self, state: UnitState) -> None:
        """From here on the unit is needed for `state`."""
        if self.state < state:
            self._enter(state)

    def make_sharded(self, *, held: bool = True) -> None:
        """Back to DTensors, unless a forward, a backward or, if `held`, `unshard()` still needs the whole tensors."""
        needed = BACKWARD if self.passes.in_backward else FORWARD if self.uses else SHARDED
        if needed < self.state and not (held and self.state is HELD):
            self._enter(needed)

    def _refuse(self, wanted: str) -> NoReturn:
        raise RuntimeError(
            f"unit {self.name or 'of the root'} is {self.state.name}, and {wanted} was wanted, which can't follow: did "
            f"a minibatch end, or load_state_dict run, inside of a forward or a backward?"
        )

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
        """From here on parameters are only read: in a minibatch, and outside of one what is whole."""
        self._versions = [tensor._version for tensor in self._only_read]

    def refuse_edits(self) -> None:
        """Raises RuntimeError if a parameter was edited in a minibatch, or a whole one outside: [Note: edits]."""
        versions = [tensor._version for tensor in self._only_read]
        if versions == self._versions:  # in every forward: a comparison of lists is the fastest
            return
        protocol, seen, self._versions = self.passes.protocol, self._versions, versions
        for tensor, parameter, before, now in zip(self._only_read, self._edited_with, seen, versions, strict=True):
            if before != now and (protocol.is_open or (tensor is parameter.leaf and protocol.world > 1)):
                where = "inside a minibatch" if protocol.is_open else "while it was whole"
                raise RuntimeError(
                    f"{parameter.name} was edited in place {where}, in memory that other ranks read, so its values are "
                    f"no longer what they were: load them again. Edit sharded parameters, outside of minibatches and "
                    f"after reshard(), on all ranks, and call publish(model) before the next forward"
                )

    def hold(self) -> None:
        self.make_whole(HELD)
        self.fetch()
        self.wait()
        for slot in self.slots:
            slot.parameter.hold_whole()

    def release(self) -> None:
        before = self.state
        self.make_sharded(held=False)
        self.let_go()
        for slot in self.slots:
            slot.parameter.let_go()
        if before is not SHARDED and not self.passes.protocol.is_open:
            self.refuse_edits()

    def reset(self) -> None:
        """Forgets `unshard()`, and uses that an interrupt between two lines left open."""
        if self.state is HELD or self.uses:
            self.uses = 0
            self.release()

    def fetch(self) -> None:
        """Starts filling the whole tensors."""
        for storage in self.gathered:
            storage.fetch(self, self.passes.protocol.publication.number)

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
        if not (self.uses or self.state is HELD):
            for storage in self.gathered:
                storage.release(self)

    @property
    def is_fetched(self) -> bool:
        """True if it keeps whole tensors for a forward, a backward or `unshard()` already."""
        return any(storage.serves(self) for storage in self.gathered)

    @property
    def _reshards_after_forward(self) -> bool:
        return not self.is_root if self.reshard_after_forward is None else self.reshard_after_forward

    def forward_begins(self) -> None:
        self.passes.forward_begins()
        with self.passes.prefetch.lock:
            self.uses += 1

    def prepare(self) -> None:
        """Puts whole tensors into their places. Raises RuntimeError if a parameter was replaced or edited."""
        with self.passes.prefetch.lock:  # else another thread would find it whole before all places are
            self.check_places()
            self.make_whole(FORWARD)
        if self.passes.protocol.is_open:
            self.refuse_edits()

    def forward_ends(self, error: BaseException | None, *, backward_follows: bool) -> None:
        with self.passes.prefetch.lock:
            running = self.uses  # none if `reset` has ended it
            self.uses = running - 1 if running else 0
            # After a recomputation its backward follows at once.
            if not (backward_follows and (in_backward_pass() or not self._reshards_after_forward)):
                self.make_sharded()
                self.let_go()
            elif self.state is FORWARD and not self.uses:
                self._enter(KEPT)
        self.passes.forward_ends(error, is_watched=backward_follows)
        if error is None and not running:
            self._refuse("the end of a forward")
        if error is None and self.state is SHARDED and not self.passes.protocol.is_open:
            self.refuse_edits()

    def backward_begins(self) -> None:
        self.passes.prefetch.needs(self, in_backward=True)

    def backward_ends(self) -> None:
        if not torch.is_grad_enabled():  # else it makes a graph, whose own backward needs the parameters again
            self.let_go()


class Passes(Participant):
    """A model's forwards and backwards, as its units and parameters report them; `count`: microbatches ended in this
    minibatch.

    A forward outside of a minibatch waits for what the owners publish; a backward there is refused, unless nothing that
    is sharded trains. What can't end correctly fails the minibatch. Each microbatch checks that the ranks of this
    replica are alive, so that a death is known long before the exit.
    """

    name = "microbatches"

    def __init__(
        self,
        protocol: Protocol,
        *,
        units: Sequence[Unit] = (),
        parameters: Sequence[ShardedParameter] = (),
        ignored: Container[int] = (),
    ) -> None:
        """`units` and `parameters`: all of the model, also those added later; none where FSDP2 has them. `ignored`: the
        ids of `fully_shard`'s `ignored_params`.
        """
        self.protocol, self._units, self._parameters, self._ignored = protocol, units, parameters, ignored
        self._owners = range(protocol.grid.first, protocol.grid.first + protocol.grid.shards)
        self.prefetch = Prefetch()
        self.count = 0
        self._of_ranks: list[int] = []  # `count` of each rank at the last exit
        self.in_backward = False
        self._graph_is_kept = False  # the backward makes a graph, for its own backward
        self._has_looked = False
        self._forwards = 0  # units whose forward is running, nested ones included
        self._forward_start_s = self._backward_start_s = 0.0
        self._loss_start_s: float | None = None  # a forward ended there and its backward has not begun

    def entry(self, given: None) -> None:
        if self.in_forward:
            raise RuntimeError("a minibatch can't begin inside a forward of the model")
        if self.in_backward:  # outside of a minibatch, where it raised
            self._stop_backward()
        for unit in self._units:
            unit.check_places()
        self._refuse_added()
        for parameter in self._parameters:
            parameter.follow_requires_grad()

    def _refuse_added(self) -> None:
        """Raises for parameters that came after fully_shard: each rank would train its own copy of them."""
        for root in [each.module for each in self._units if each.is_root] or [each.module for each in self._units]:
            known = {id(each) for parameter in self._parameters for each in (parameter.sharded, parameter.leaf)}
            for name, value in root.named_parameters():
                if value.requires_grad and id(value) not in known and id(value) not in self._ignored:
                    raise RuntimeError(
                        f"{name} was added after fully_shard, so its gradient would stay on this rank and the copies "
                        f"would drift apart: add it before (first get_peft_model, then fully_shard), or freeze it"
                    )

    def _look_once(self) -> None:
        """At the first backward outside of a minibatch: what its entry would find."""
        if not self._has_looked:
            self._refuse_added()
            for parameter in self._parameters:
                parameter.follow_requires_grad()
            self._has_looked = True

    def opened(self) -> None:
        self.count = 0
        for unit in self._units:
            unit.expire()
            unit.watch_edits()

    def leave(self) -> None:
        """Does not wait for passes that have not ended."""
        if self.in_backward:
            self._stop_early()
        else:
            self._stop_backward()
        self._forwards = 0
        for unit in self._units:
            unit.reset()
        for unit in self._units:
            unit.refuse_edits()

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
            if protocol.is_open or protocol.is_alone:
                where = f" in minibatch {protocol.number}" if protocol.is_open else ""
                protocol.require_alive(self._owners, f"the shards of all ranks{where}")
            if not protocol.is_open or (protocol.reads_only and protocol.is_alone):
                protocol.publication.wait_readable()
        except BaseException:
            self._forwards -= 1
            raise
        protocol.streams.computes_here()
        self._forward_start_s = time.monotonic()

    def forward_ends(self, error: BaseException | None, *, is_watched: bool = True) -> None:
        """`is_watched`: a backward through the output would be noticed."""
        protocol = self.protocol
        if not self._forwards:  # `leave` has ended it
            return
        self._forwards -= 1
        if self._forwards or in_backward_pass():
            return
        now_s = time.monotonic()
        protocol.events.add("forward", self._forward_start_s, now_s)
        may_follow = (protocol.is_open or (protocol.reads_only and is_watched)) and torch.is_grad_enabled()
        backward_follows = may_follow and error is None
        self._loss_start_s = now_s if backward_follows else None
        if not backward_follows:
            self.prefetch.microbatch_ends()
        if error is not None:
            if protocol.is_open:
                protocol.fail(describe(error))
        elif not protocol.is_open:
            if not (protocol.is_alone and may_follow):  # in a loop the host would wait for each microbatch
                protocol.streams.drain("reading the parameters")
            protocol.publication.check_not_torn()

    def backward_begins(self, number: int | None) -> None:
        """A backward of a forward in minibatch `number` is running; None: of one outside of minibatches."""
        protocol = self.protocol
        self._graph_is_kept = torch.is_grad_enabled()
        if self.in_backward:
            return
        protocol.refuse_in_child("a backward")
        if not protocol.is_open:
            if not protocol.reads_only:
                raise RuntimeError(f"backward outside of a minibatch: {self.protocol.backward_belongs}")
            self._look_once()
        if number != protocol.number and not protocol.reads_only:
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
            unit.make_whole(BACKWARD)
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
        self.prefetch.microbatch_ends()
        for unit in self._units:
            unit.make_sharded()
            if not self._graph_is_kept:
                unit.let_go()
