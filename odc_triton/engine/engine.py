"""The minibatch protocol: what one rank may do when, and the two meetings that keep the ranks together.

    READY --begin()--> OPEN --end()--> LANDED --optimizer step--> READY
      ^                  |                |
      |   (a microbatch raised: on all    |
      +---------- ranks) ----------+      +--begin(): without a step--> OPEN

READY   parameters readable, no gradients
OPEN    inside a minibatch: shards are only read, gradient shards only added to
LANDED  every rank's gradients are in the owners' shards; `p.grad` is set
BROKEN  a meeting failed: a peer is gone or too late, this job can't go on
"""

from __future__ import annotations

import contextlib
import operator
import os
import time
import warnings
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from ..base.errors import DeadlineExceeded, MinibatchFailed, RankLost, RanksDiffer, describe
from ..base.events import EventLog
from ..comm.grid import Grid
from ..comm.meeting import Meetings
from ..comm.memory.heap import Signs, SymmetricHeap, Word
from ..comm.replicas import Replicas
from ..nn.staging import Staging
from .gradients import Waits
from .optimizer_watch import Hyperparameters, OptimizerWatch
from .parameter import ShardedParameter
from .passes import Microbatches
from .prefetch import Prefetch
from .publication import Publication, clear_gradients, copy_masters, land_gradients
from .streams import Streams
from .unit import Unit


class Phase(IntEnum):
    READY = 0
    OPEN = 1
    LANDED = 2
    BROKEN = 3


def _checked_tokens(tokens: Any) -> int | None:
    """`tokens` as an int: any integer, of Python, numpy or a tensor of one element, of at least 0."""
    if tokens is None:
        return None
    try:
        count = -1 if isinstance(tokens, bool) else operator.index(tokens)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"tokens is {tokens!r}; give this rank's number of target tokens, an int of at least 0")
    return count


class Engine:
    """One sharded model on one rank: its units, its parameters, its place in the protocol."""

    def __init__(
        self,
        *,
        grid: Grid,
        heap: SymmetricHeap,
        signs: Signs,
        replicas: Replicas,
        streams: Streams,
        meetings: Meetings,
        debug: bool,
    ) -> None:
        self.grid, self.heap, self.signs, self.replicas = grid, heap, signs, replicas
        self.meetings, self.debug = meetings, debug
        self._streams = [streams]
        self._stagings: set[Staging] = set()
        self.prefetch = Prefetch()
        self.publication = Publication(heap, meetings)
        self.rank, self.world = grid.rank, grid.world
        self.units: list[Unit] = []
        self.parameters: list[ShardedParameter] = []
        self.events = EventLog(self.rank)
        self.phase = Phase.READY
        self.minibatch = -1  # number of the minibatch that is open or was last
        self.divide_factor: float | None = None  # set_gradient_divide_factor
        self._tokens: int | None = None
        self._failure: str | None = None
        self._step_start_s = 0.0
        self._stepping = False  # an optimizer's step runs now
        self._pid = os.getpid()
        self.ignored: dict[int, nn.Parameter] = {}  # what fully_shard was told to leave alone, by id
        self._warned: set[str] = set()
        self._scope = contextlib.ExitStack()
        self.hyperparameters = Hyperparameters()
        self._optimizers = OptimizerWatch(self)
        self.microbatches = Microbatches(self)

    # ------------------------------------------------------------------ parameters

    def add(self, parameters: list[ShardedParameter]) -> None:
        for parameter in parameters:
            self.parameters.append(parameter)
            self._stagings.add(parameter.staging)
            if parameter.trains:
                parameter.listen(self)

    def absorb(self, inner: Engine) -> None:
        """Takes over a submodule that was sharded before its root; its parameters stay where they are."""
        for unit in inner.units:
            unit.reset()
            unit.engine, unit.is_root = self, False
        self.units += inner.units
        self._streams += inner._streams
        self.add(inner.parameters)
        inner.retire()

    def name_parameters(self, root: nn.Module) -> None:
        """Names every parameter as seen from the root."""
        names = {id(value): name for name, value in root.named_parameters()}
        for parameter in self.parameters:
            parameter.name = names[id(parameter.sharded)]

    def originals(self) -> Iterator[tuple[nn.Parameter, ShardedParameter]]:
        """Parameters as they were before sharding, where something still holds them: a tie into this module."""
        for parameter in self.parameters:
            original = parameter.original() if parameter.original is not None else None
            if original is not None:
                yield original, parameter

    def gradient_comes(self, parameter: ShardedParameter) -> None:
        self.microbatches.backward_begins(self.minibatch)

    def waited(self, parameter: ShardedParameter, waits: Waits) -> None:
        for start_s, end_s in waits:
            self.events.add("wait", start_s, end_s, label=f"lock of {parameter.name}")

    def trainable(self) -> list[ShardedParameter]:
        return [parameter for parameter in self.parameters if parameter.trains]

    # ------------------------------------------------------------------ the minibatch

    def begin(self, tokens: int | None) -> int | None:
        """Enters the next minibatch; returns the tokens of all ranks, None where none were given.

        Raises RankLost, DeadlineExceeded, MinibatchFailed (another rank could not enter).
        """
        self.refuse_in_child("a minibatch")
        if self.phase is Phase.OPEN:
            raise RuntimeError(f"minibatch {self.minibatch} is still open: minibatches don't nest")
        if self.phase is Phase.BROKEN:
            raise RuntimeError("an earlier meeting of this model's ranks failed; start again from the last checkpoint")
        error: BaseException | None = None
        try:
            tokens = _checked_tokens(tokens)
            self._prepare()
        except Exception as raised:
            error = raised
        number = self.minibatch + 1
        message = {
            "tokens": None if error else tokens,
            "published": self.publication.number,
            "stepped": self.hyperparameters.digest(),
        }
        self.events.minibatch, self.events.microbatch = number, -1
        messages = self._meet(f"enter minibatch {number}", message, error)
        self.minibatch = number
        self._settle(messages, error)
        given = [theirs["tokens"] for theirs in messages]
        missing = [rank for rank, count in enumerate(given) if count is None]
        if missing and len(missing) < self.world:
            self._stay_outside()
            raise RanksDiffer(f"tokens was given on some ranks but not on ranks {missing}; give it on all or on none")
        try:
            self.hyperparameters.compare([theirs["stepped"] for theirs in messages], self.meet)
        except RanksDiffer:
            self._stay_outside()
            raise
        self._tokens = None if missing else sum(given)
        self.publication.agree(max(theirs["published"] for theirs in messages))
        self.microbatches.count, self._failure = 0, None
        for unit in self.units:
            unit.expire()
        self._enter_phase(Phase.OPEN)
        for parameter in self.trainable():
            parameter.expect_gradient()
        if self.debug:
            from .debug import RefuseCollectives

            self._scope.enter_context(RefuseCollectives())
        return self._tokens

    def _prepare(self) -> None:
        """This rank's side of entering: gradient shards are zero, masters are published."""
        if self.microbatches.in_forward:
            raise RuntimeError("a minibatch can't begin inside a forward of the model")
        if self._stepping:
            raise RuntimeError(
                "a minibatch can't begin: an optimizer step has begun and not ended. Don't run it in step(closure); "
                "and after a step that raised, start again from the last checkpoint"
            )
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                "torch.use_deterministic_algorithms(True) can't be kept: gradients are added in the order of their "
                "arrival. Switch it off around training with odc-triton."
            )
        for unit in self.units:
            unit.check_places()
        self._refuse_added()
        for parameter in self.parameters:
            parameter.follow_requires_grad()
        if self.phase is Phase.LANDED and any(p.sharded.grad is not None for p in self.parameters):
            self._warn_once(
                "dropped",
                f"the gradients of minibatch {self.minibatch} are dropped: no optimizer step followed it. "
                f"Put all microbatches of a step into one minibatch.",
            )
        if self.heap.rank == 0 and any(parameter.spec.is_scalar for parameter in self.trainable()):
            # Every rank of the replica takes a scalar's gradient from here, a slow one maybe not yet.
            self.meetings.wait_until(
                f"the scalars' gradients of minibatch {self.minibatch} to be taken",
                lambda: [
                    rank
                    for rank, count in enumerate(self.heap.seen(Word.LANDED), self.heap.first)
                    if count <= self.minibatch
                ],
            )
        clear_gradients(self.trainable(), self._streams[0])
        for parameter in self.parameters:
            parameter.check_memory()
        if self.replicas.count == 1:  # else what was written by hand takes an exchange: publish(model)
            copy_masters(self.parameters, self._streams[0])
        self.drain("clearing gradients and publishing before a minibatch")

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the minibatch: all gradients have landed when it returns.

        `error`: what a microbatch raised. Raises MinibatchFailed on every rank if any rank failed.
        """
        self.refuse_in_child("the end of a minibatch")
        if self.phase is not Phase.OPEN:
            raise RuntimeError(f"no minibatch is open (the engine is {self.phase.name}): call begin_minibatch first")
        self._scope.close()
        self.microbatches.stop()
        for parameter in self.trainable():
            parameter.sharded.grad = None
        for unit in self.units:
            unit.reset()
        purpose = f"leave minibatch {self.minibatch}"
        lost = isinstance(error, (RankLost, DeadlineExceeded))
        if lost or (error is not None and not isinstance(error, Exception)):
            # A peer is lost or too late, or a wish to stop (Ctrl-C, exit): peers are told, nobody is waited for.
            self._enter_phase(Phase.BROKEN)
            with contextlib.suppress(torch.distributed.DistError):  # the store may be what was lost
                self.meetings.tell(purpose, {"error": describe(error)})
            return
        try:
            self.drain(f"the microbatches of minibatch {self.minibatch}")
        except Exception as raised:
            error = error or raised
        if error is None and self._failure is not None:
            error = RuntimeError(self._failure)
        touched = [index for index, parameter in enumerate(self.parameters) if parameter.touched]
        message = {"touched": touched, "microbatches": self.microbatches.count}
        messages = self._meet(purpose, message, error)
        self.events.microbatch = -1
        self._settle(messages, error)
        with self._together():
            self._land({index for theirs in messages for index in theirs["touched"]})
        self.heap.show(Word.LANDED, self.minibatch + 1)
        self._enter_phase(Phase.LANDED)
        counts = [theirs["microbatches"] for theirs in messages]
        if self._tokens is None and len(set(counts)) > 1:
            self._warn_once(
                "counts",
                f"ranks ran {counts} microbatches in minibatch {self.minibatch} and gradients are divided by the "
                f"number of ranks; give tokens= to minibatch() and divide the loss by mb.tokens",
            )

    def _land(self, touched: set[int]) -> None:
        factor = self.divide_factor or (self.world if self._tokens is None else 1)
        for index, parameter in enumerate(self.parameters):
            if parameter.trains and index not in touched:
                parameter.land(None)
        with contextlib.ExitStack() as scope:
            if self.replicas.count > 1:
                scope.enter_context(self.events.span("wait", label="sum over replicas", microbatch=-1))
            parameters = [self.parameters[index] for index in sorted(touched)]
            land_gradients(parameters, factor, self.replicas, self._streams[0])
        self.drain("taking the landed gradients")

    def _refuse_added(self) -> None:
        """Raises for parameters that came after fully_shard: each rank would train its own copy of them."""
        known = {id(each) for parameter in self.parameters for each in (parameter.sharded, parameter.leaf)}
        for root in [unit.module for unit in self.units if unit.is_root]:
            for name, value in root.named_parameters():
                if value.requires_grad and id(value) not in known and id(value) not in self.ignored:
                    raise RuntimeError(
                        f"{name} was added after fully_shard, so its gradient would stay on this rank and the copies "
                        f"would drift apart: add it before (first get_peft_model, then fully_shard), or freeze it"
                    )

    def refuse_in_child(self, what: str) -> None:
        """Raises in a process that was forked from this rank's, which has its shared memory and is no rank."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{what} in process {os.getpid()}, forked from rank {self.rank} (process {self._pid}): it would write "
                f"into the memory that the ranks share. A forked process may run the model forward, nothing else"
            )

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Around what replicas do together: whoever leaves it early lets the others know."""
        try:
            yield
        except BaseException:
            if self.replicas.count > 1:
                self._enter_phase(Phase.BROKEN)
            raise

    def _meet(self, purpose: str, message: dict[str, Any], error: BaseException | None) -> list[dict[str, Any]]:
        message = {**message, "error": None if error is None else describe(error)}
        try:
            with self.events.span("wait", label=purpose, microbatch=-1):
                return self.meetings.meet(purpose, message)
        except BaseException:
            self._enter_phase(Phase.BROKEN)
            raise

    def meet(self, purpose: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """A meeting of a training loop's own, outside of minibatches; returns all ranks' messages, which are JSON.

        Raises RankLost, DeadlineExceeded.
        """
        if self.phase is Phase.BROKEN:
            raise RuntimeError("an earlier meeting of this model's ranks failed; start again from the last checkpoint")
        return self._meet(purpose, message, None)

    def require_peers(self, purpose: str) -> None:
        """Raises RankLost at once if a peer's process is gone. `purpose`: what this rank needs them for."""
        self._require(list(range(self.world)), purpose)

    def require_replica(self, purpose: str) -> None:
        """As `require_peers`, of the ranks of this replica only: a few microseconds."""
        self._require(list(range(self.grid.first, self.grid.first + self.grid.shards)), purpose)

    def _require(self, ranks: list[int], purpose: str) -> None:
        try:
            self.meetings.require_alive(ranks, purpose, lambda: ranks)
        except RankLost:
            if self.phase is not Phase.OPEN:  # else the minibatch ends by it
                self._enter_phase(Phase.BROKEN)
            raise

    def give_up(self, error: BaseException) -> None:
        """Tells peers that this rank's training loop ended by `error`, outside of a minibatch; waits for nobody."""
        if self.phase is not Phase.BROKEN:
            self._enter_phase(Phase.BROKEN)
            with contextlib.suppress(torch.distributed.DistError):  # the store may be gone
                self.meetings.give_up(describe(error))

    def _settle(self, messages: list[dict[str, Any]], error: BaseException | None) -> None:
        """Raises MinibatchFailed on all ranks if any of them brought an error to the meeting."""
        failed = {rank: theirs["error"] for rank, theirs in enumerate(messages) if theirs["error"] is not None}
        if failed:
            for parameter in self.trainable():
                parameter.sharded.grad = None
                parameter.dirty = True
            self._stay_outside()
            raise MinibatchFailed(self.minibatch, failed) from error

    def _stay_outside(self) -> None:
        """The minibatch is over before it was open, or without gradients."""
        self.heap.show(Word.LANDED, self.minibatch + 1)
        self._enter_phase(Phase.READY)

    def drain(self, purpose: str) -> None:
        """Waits until this rank's device has done what was enqueued: peers are told so next."""
        for streams in self._streams:
            streams.drain(self.meetings.timeout_s, purpose)
        for staging in self._stagings:
            staging.check()

    def computes_here(self) -> None:
        """Says that modules compute on the current stream: what they read of peers is to be waited for."""
        for streams in self._streams:
            streams.computes_here()

    def _enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.signs.show(Word.BROKEN, phase is Phase.BROKEN)
        self.signs.show(Word.MINIBATCH, self.minibatch)

    @property
    def is_open(self) -> bool:
        """Whether a minibatch is open."""
        return self.phase is Phase.OPEN

    def fail(self, reason: str) -> None:
        """Marks the open minibatch as failed; every rank hears of it at the exit."""
        self._failure = self._failure or reason

    # ------------------------------------------------------------------ publishing

    def publish(self, *, stepped: bool = False) -> None:
        """Makes this rank's shards readable as they are now, and says so. Called after every optimizer step.

        With replicas all ranks call it, as each has a part of every replica's shards. `stepped`: by an optimizer's
        step, so frozen parameters are as they were.
        """
        self.refuse_in_child("publish")
        if self.phase is Phase.OPEN:
            raise RuntimeError("parameters can't be published inside a minibatch: peers are reading them")
        self.publication.announce()  # before the copies
        with self.events.span("publish", microbatch=-1):
            for parameter in self.parameters:
                parameter.check_memory()
            if self.replicas.count == 1:
                copy_masters(self.parameters, self._streams[0])
            else:
                with self._together():
                    self._copy_between_replicas(self.trainable() if stepped else self.parameters)
            self.drain("publishing the parameters")
        self.publication.complete()

    def _copy_between_replicas(self, parameters: list[ShardedParameter]) -> None:
        copy_masters(parameters, self._streams[0])
        self.drain("publishing the own part of the parameters")
        self.replicas.gather_parts([each.compute_parts() for each in parameters if not each.spec.is_scalar])

    def full_parameters(self, some: list[ShardedParameter] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, a copy of the whole tensor in the compute dtype), one at a time, of all or `some`; no other rank
        takes part."""
        published = self.publication.number
        for parameter in self.parameters if some is None else some:
            if self.phase is not Phase.OPEN:
                self.publication.wait_readable()
            value = parameter.read()
            self.drain("reading whole parameters")
            if self.phase is not Phase.OPEN:
                self.publication.check_not_torn()
            if self.publication.number != published:
                raise RuntimeError("the parameters were stepped or published during this walk: start a new one")
            yield parameter.name, value

    # ------------------------------------------------------------------ optimizers

    def step_begins(self) -> None:
        self.refuse_in_child("an optimizer step")
        if self.phase is Phase.OPEN:
            raise RuntimeError(
                "optimizer step inside a minibatch: gradients have not landed and peers are reading the parameters. "
                "Step after the `with minibatch(...)` block."
            )
        if self.phase is Phase.BROKEN:
            raise RuntimeError("the ranks have lost each other; this step would use partial gradients")
        self._step_start_s = time.monotonic()
        self._stepping = True
        self.publication.announce()

    def step_ends(self) -> None:
        self.events.add("step", self._step_start_s, time.monotonic(), microbatch=-1)
        self._stepping = False
        self._enter_phase(Phase.READY)
        self.publish(stepped=True)

    # ------------------------------------------------------------------ odds

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=4)

    def retire(self) -> None:
        """Stops listening: another engine drives these parameters from now on."""
        self._optimizers.stop()
