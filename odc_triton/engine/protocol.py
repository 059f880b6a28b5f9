"""The minibatch protocol of one rank: its phases, its two barriers, and the order of everything around them.

READY --begin()--> OPEN --end()--> REDUCED --optimizer step--> READY
      ^                  |                |
      |   (a microbatch raised: on all    |
      +---------- ranks) ----------+      +--begin(): without a step--> OPEN

READY    parameters readable, no gradients
OPEN     inside a minibatch: compute shards are only read, gradient shards only added to
REDUCED  every rank's gradients are in the owners' shards; `p.grad` is set
BROKEN   a barrier failed: a peer is gone or too late; this job can't go on

Features take part by the hooks of minibatch.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from traceback import walk_tb
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..base.errors import (
    DeadlineExceeded,
    MinibatchFailed,
    MinibatchToRepeat,
    OdcError,
    OfRanks,
    PeerFailed,
    RankLost,
    RanksDiffer,
    describe,
)
from ..base.events import EventLog
from ..comm.barrier import Barrier
from ..comm.replicas import Grid, Replicas
from .minibatch import Participant, SameSamples, Tokens
from .shard import Shard, Zeros, clear_gradients, copy_masters, reduce_gradients, refuse_edited
from .steps import Hyperparameters, OptimizerWatch, Publication
from .transport import AllStreams, Transport

Kind = TypeVar("Kind", bound=Participant)


class Phase(IntEnum):
    READY = 0
    OPEN = 1
    REDUCED = 2
    BROKEN = 3


def _is_fatal(error: BaseException | None) -> bool:
    """True if a rank with this error can't wait at another barrier."""
    return isinstance(error, (RankLost, DeadlineExceeded)) or not isinstance(error, Exception | None)


def _is_of_communication(error: Exception) -> bool:
    """True if it was raised in torch.distributed: gloo's and NCCL's are RuntimeErrors like others'."""
    *_, module = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return isinstance(error, dist.DistError) or module.startswith(("torch.distributed", "torch._ops"))


def _messages_of(participant: Participant, messages: list[dict[str, Any]]) -> list[Any]:
    """By rank; None where a rank has no such participant, or this one no message."""
    parts = (theirs["parts"].get(participant.name) for theirs in messages)
    return [None if part is None else json.loads(part) for part in parts]


class Protocol:
    """`shards`: the memory of all parameters, in the same order on all ranks. `number`: of the open or the last
    minibatch, -1 before the first. `failure`: why the open minibatch fails at its end, None if it does not. `events`:
    what this rank did. `deterministic`: a minibatch may have to be run again, see checkpoint/repeat.py.
    """

    deterministic = False

    def __init__(self, *, grid: Grid, transport: Transport, barrier: Barrier, replicas: Replicas) -> None:
        self.transport, self.heap, self.barrier = transport, transport.heap, barrier
        self.grid, self.replicas = grid, replicas
        self.rank, self.world = barrier.rank, barrier.world
        self.streams = AllStreams(transport.streams, timeout_s=barrier.timeout_s)
        self.events = EventLog(self.rank)
        self.phase, self.number = Phase.READY, -1
        self.failure: str | None = None
        self.shards: list[Shard] = []
        self.divide_factor: float | None = None  # set_gradient_divide_factor
        self.tokens, self.hyperparameters = Tokens(self.world), Hyperparameters(self.exchange)
        self.publication = Publication(self.heap, barrier)
        self.participants: list[Participant] = []
        self.register(self.tokens, SameSamples(self.rank, self.world), self.hyperparameters, self.publication)
        self.optimizers = OptimizerWatch(self)
        self._zeros: Zeros | None = None  # at the entry of this minibatch, or of the one that is repeated
        self._lost: set[Shard] = set()
        self._stepping: int | None = None  # the id of the optimizer whose step is running, the outermost
        self._step_start_s = 0.0
        self._warned: set[str] = set()
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """True between entry and exit."""
        return self.phase is Phase.OPEN

    @property
    def is_broken(self) -> bool:
        return self.phase is Phase.BROKEN

    def fail(self, reason: str) -> None:
        """Marks the open minibatch as failed; it fails on every rank at the exit."""
        self.failure = self.failure or reason

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.barrier.show(minibatch=self.number, broken=self.is_broken)

    def originals(self) -> Iterable[tuple[nn.Parameter, Any]]:
        """(parameter as it was before sharding, as it is now), where something still holds the first."""
        return ()

    @property
    def divides_by_ranks(self) -> bool:
        """True if gradients are divided by the number of ranks, as neither tokens nor a divisor were given."""
        return self.divide_factor is None and self.tokens.total is None and self.tokens.late_divisor is None

    def register(self, *participants: Participant) -> None:
        """Lets them take part from the next minibatch on. On all ranks, in the same order."""
        if self.is_open:
            raise RuntimeError("a participant can't be registered inside a minibatch")
        for each in participants:
            if any(each.name == other.name for other in self.participants):
                raise ValueError(f"there is a participant of the name {each.name!r} already")
            self.participants.append(each)

    def participant(self, kind: type[Kind]) -> Kind | None:
        """The participant of this class; None if the feature is not in use."""
        return next((each for each in self.participants if isinstance(each, kind)), None)

    def trainable(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.trains]

    def begin(self, given: Callable[[], dict[str, Any]]) -> None:
        """Enters the next minibatch. `given`: makes the arguments of participants, by the names of these.

        Raises RankLost, DeadlineExceeded, RanksDiffer, MinibatchFailed (another rank could not enter).
        """
        self.refuse_in_child("a minibatch")
        if self.is_open:
            raise RuntimeError(f"minibatch {self.number} is still open: minibatches don't nest")
        self._refuse_broken()
        error: Exception | None = None
        parts: dict[str, str] = {}
        try:
            wanted = given()
            self.refuse_unknown(wanted)
            parts = self._parts(lambda each: each.entry(wanted.get(each.name)))
            self._prepare()
        except BaseException as raised:
            if _is_fatal(raised):
                self._break(f"enter minibatch {self.number + 1}", raised)
                raise
            error = raised
        self.events.minibatch, self.events.microbatch = self.number + 1, -1
        messages = self._exchange(f"enter minibatch {self.number + 1}", {"parts": parts}, error)
        self.number += 1
        self._raise_failures(messages, error)
        try:
            for each in self.participants:
                each.entered(_messages_of(each, messages))
        except RanksDiffer:
            self._enter(Phase.READY)
            raise
        self.failure = None
        self._enter(Phase.OPEN)
        for each in self.participants:
            each.opened()
        for shard in self.trainable():
            shard.expect_gradient()
            shard.lost = shard in self._lost

    def give(self, **given: Any) -> None:
        """Arguments of `minibatch` that were not known at the entry. On all ranks that go on, with the same values."""
        self.refuse_unknown(given)
        for each in self.participants:
            if (value := given.get(each.name)) is not None:
                each.entry(value)
                each.opened()

    def refuse_unknown(self, given: dict[str, Any]) -> None:
        """Raises RuntimeError for an argument of `minibatch` that no participant takes."""
        takers = {each.name for each in self.participants}
        for name, value in given.items():
            if value is not None and name not in takers:
                raise RuntimeError(
                    f"this minibatch was given a {name}: call enable_{name}(model, tokens=…) after fully_shard"
                )

    def _parts(self, message_of: Callable[[Participant], Any]) -> dict[str, str]:
        """The participants' messages. Raises TypeError for one that is not JSON."""
        parts = {}
        for each in self.participants:
            message = message_of(each)
            try:
                if message is not None:
                    parts[each.name] = json.dumps(message)
            except TypeError as error:
                raise TypeError(f"the message of {each.name!r}: {error}") from None
        return parts

    def _prepare(self) -> None:
        """This rank's side of the entry: gradient shards are zero, masters are published."""
        if self._stepping is not None:
            raise RuntimeError(
                "a minibatch can't begin: an optimizer step has begun and not ended. Open no minibatch in "
                "step(closure); if a step raised, start again from the last checkpoint"
            )
        if self.phase is Phase.REDUCED and any(shard.has_gradient for shard in self.shards):
            self.warn_once(
                "dropped",
                f"the gradients of minibatch {self.number} are dropped: no optimizer step followed it. "
                f"Put all microbatches of a step into one minibatch.",
            )
        if self._zeros is None:
            self._zeros = Zeros(self.shards)
            self._lost = set() if self.phase is Phase.REDUCED else self._zeros.lost(self.shards)
        clear_gradients(self.trainable(), self.streams.first)
        if self._publishes_parts:
            refuse_edited(self.shards)
        else:
            copy_masters(self.shards, self.streams.first)
        self.drain("clearing gradients and publishing before a minibatch")

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the minibatch: all gradients are reduced when it returns.

        `error`: what a microbatch raised. Raises MinibatchFailed on every rank if any rank failed.
        """
        self.refuse_in_child("the end of a minibatch")
        if not self.is_open:
            raise RuntimeError(f"no minibatch is open (the engine is {self.phase.name}): call begin_minibatch first")
        error, zeros = self._leave(error)
        purpose = f"leave minibatch {self.number}"
        if _is_fatal(error):
            self._break(purpose, error)
            return
        parts: dict[str, str] = {}
        try:
            self.drain(f"the microbatches of minibatch {self.number}")
            parts = self._parts(lambda each: each.exit())
        except Exception as raised:
            if error is None and _is_fatal(raised):
                self._break(purpose, raised)
                raise
            error = error or raised
        touched = [place for place, shard in enumerate(self.shards) if shard.touched]
        messages = self._exchange(purpose, {"touched": touched, "zeros": zeros, "parts": parts}, error)
        self.events.microbatch = -1
        self._settle(messages, error)
        self._zeros = None
        zeros = set.intersection(*(set(theirs["zeros"]) for theirs in messages))
        self._reduce(zeros.union(*(theirs["touched"] for theirs in messages)))
        self._enter(Phase.REDUCED)
        for each in self.participants:
            each.reduced()

    def _leave(self, error: BaseException | None) -> tuple[BaseException | None, list[int]]:
        """Ends this rank's microbatches; returns its error, if any, and the places of gradients that stay zeros."""
        zeros = self._zeros.kept(self.shards)
        for shard in self.trainable() if error is None else ():
            try:
                shard.refuse_zeroed()
            except RuntimeError as zeroed:
                self.fail(str(zeroed))
        given = [shard.name for shard in self.trainable() if shard.expect_no_more()]
        if given:
            self.fail(
                f"p.grad of {given[0]} was assigned inside the minibatch, but the ranks' sum replaces it at the "
                f"end: assign it after the `with minibatch(...)` block"
            )
        refusal: Exception | None = None
        for each in self.participants:
            try:
                each.leave()
            except Exception as raised:
                refusal = refusal or raised
        if error is None:
            error = refusal if self.failure is None else RuntimeError(self.failure)
        if error is not None:
            for each in self.participants:
                each.failed()
        return error, zeros

    def _settle(self, messages: list[dict[str, Any]], error: BaseException | None) -> None:
        """Raises MinibatchFailed on all ranks if one of them failed, or what a participant raises."""
        failed = any(theirs["error"] is not None for theirs in messages)
        refusal: OdcError | None = None
        for each in self.participants:
            try:
                each.settle(None if failed else _messages_of(each, messages))
            except OdcError as raised:
                if refusal is None or isinstance(refusal, MinibatchToRepeat):  # others say that it is not to be
                    refusal = raised
        self._raise_failures(messages, error)
        if refusal is not None:
            if not isinstance(refusal, MinibatchToRepeat):
                self._zeros = None
            self._drop_gradients()
            raise refusal

    def _raise_failures(self, messages: list[dict[str, Any]], error: BaseException | None) -> None:
        """Raises MinibatchFailed on all ranks if one of them has an error; `error`: this rank's."""
        failed = {rank: theirs["error"] for rank, theirs in enumerate(messages) if theirs["error"] is not None}
        failed = {rank: text for rank, text in failed.items() if not messages[rank]["follows"]} or failed
        if failed:
            self._zeros = None
            self._drop_gradients()
            raise MinibatchFailed(self.number, failed) from error

    def _drop_gradients(self) -> None:
        for shard in self.trainable():
            shard.drop()
        self._enter(Phase.READY)

    def _reduce(self, touched: set[int]) -> None:
        """Gives the optimizer the gradients of the shards at these places, and None for the others."""
        for place, shard in enumerate(self.shards):
            if shard.trains and place not in touched:
                shard.assign(None)
        shards = [self.shards[place] for place in sorted(touched)]
        factor = self.tokens.late_divisor or self.divide_factor or self.tokens.divisor
        with contextlib.ExitStack() as scope:
            if self.replicas.count > 1:
                scope.enter_context(self._collective())
                scope.enter_context(self.events.span("wait", label="sum over replicas", microbatch=-1))
            reduce_gradients(shards, factor, self.replicas, self.streams.first)
        self.drain("reducing the gradients")

    def step_begins(self, optimizer: Optimizer) -> None:
        self.refuse_in_child("an optimizer step")
        if self.is_open:
            raise RuntimeError(
                "optimizer step inside a minibatch: gradients are not reduced and peers are reading the parameters. "
                "Step after the `with minibatch(...)` block."
            )
        if self.is_broken:
            raise RuntimeError("a barrier failed, so gradients are partial: start again from the last checkpoint")
        if self._stepping not in (None, id(optimizer)):  # an optimizer of others, which publishes when all have stepped
            return
        self._step_start_s = time.monotonic()
        self.publication.announce()
        self._stepping = id(optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        if self._stepping != id(optimizer):
            return
        self.events.add("step", self._step_start_s, time.monotonic(), microbatch=-1)
        self._stepping = None
        self._enter(Phase.READY)
        self.publish(stepped=True)

    @property
    def _publishes_parts(self) -> bool:
        """True if each replica publishes only its parts of the shards, so that publishing needs all replicas."""
        return self.replicas.count > 1 and any(len(shard.compute_parts()) > 1 for shard in self.shards)

    def publish(self, *, stepped: bool = False) -> None:
        """Makes this rank's shards readable as they are now, and shows it. Called after every optimizer step.

        With replicas all ranks call it, as each has a part of every replica's shards. `stepped`: called by an
        optimizer's step, so frozen parameters are unchanged.
        """
        self.refuse_in_child("publish")
        if self.is_open:
            raise RuntimeError("parameters can't be published inside a minibatch: peers are reading them")
        self.publication.announce()  # before the copies
        with self.events.span("publish", microbatch=-1):
            if not self._publishes_parts:
                copy_masters(self.shards, self.streams.first)
            else:
                with self._collective():
                    shards = self.trainable() if stepped else self.shards
                    copy_masters(shards, self.streams.first)
                    self.drain("publishing the own part of the parameters")
                    self.replicas.gather([shard.compute_parts() for shard in shards])
            self.drain("publishing the parameters")
        self.publication.complete()

    def wait_readable(self) -> None:
        """Before this rank reads outside of a minibatch. Raises RuntimeError if it has edited what others read."""
        refuse_edited(self.shards)
        self.publication.wait_readable()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Parameters are written inside of it, and published at its end; after an error they are readable as they are.

        Announces it first, as processes outside of the job may be reading.
        """
        self.refuse_in_child("writing the parameters")
        self.publication.announce()
        try:
            yield
        except BaseException:
            self.publication.complete()
            raise
        self.publish()

    def full_parameters(self, some: Sequence[Shard] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, a copy of the whole tensor in the compute dtype), one at a time, of all shards or `some`; no other
        rank takes part.
        """
        published, shards = self.publication.number, self.shards if some is None else some
        if not self.is_open:
            refuse_edited(shards)
        for shard in shards:
            if not self.is_open:
                self.publication.wait_readable()
            whole = shard.read()
            self.drain("reading whole parameters")
            if not self.is_open:
                self.publication.check_not_torn()
            if self.publication.number != published:
                raise RuntimeError("the parameters were stepped or published during this read: read them again")
            yield shard.name, whole

    def exchange(self, purpose: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """A training loop's own barrier, outside of minibatches; returns all ranks' messages, which are JSON.

        Raises RankLost, DeadlineExceeded.
        """
        self.refuse_in_child(f"'{purpose}'")
        self._refuse_broken()
        return self._exchange(purpose, message, None)

    def _exchange(self, purpose: str, message: dict[str, Any], error: BaseException | None) -> list[dict[str, Any]]:
        message |= {"error": None if error is None else describe(error), "follows": isinstance(error, PeerFailed)}
        try:
            with self.events.span("wait", label=purpose, microbatch=-1):
                return self.barrier.exchange(purpose, message)
        except BaseException:
            self._enter(Phase.BROKEN)
            raise

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Around what replicas do together: a rank that leaves it early shows it to the others."""
        try:
            yield
        except BaseException:
            self._enter(Phase.BROKEN)
            raise

    def drain(self, purpose: str) -> None:
        """Waits until this rank's device has done what was enqueued. Comes before its status says so."""
        try:
            self.streams.drain(purpose)
        except DeadlineExceeded as error:
            self.barrier.raise_late(purpose, error)

    def _refuse_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError("an earlier barrier of this model's ranks failed; start again from the last checkpoint")

    def refuse_in_child(self, what: str) -> None:
        """Raises in a process forked from this rank's: it has the shared memory but is no rank."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{what} in process {os.getpid()}, forked from rank {self.rank} (process {self._pid}): it would write "
                f"into the memory that the ranks share. A forked process may run the model forward, nothing else"
            )

    def require_alive(self, ranks: Sequence[int], purpose: str) -> None:
        """Raises RankLost at once if one of these ranks' processes is gone; a few microseconds.

        `purpose`: what this rank needs them for.
        """
        try:
            self.barrier.require_alive(ranks, purpose, lambda: ranks)
        except RankLost:
            if not self.is_open:  # else the error ends the minibatch
                self._enter(Phase.BROKEN)
            raise

    @contextlib.contextmanager
    def naming_lost(self, what: str) -> Iterator[None]:
        """Around code that communicates in ways of its own: if its error comes from a peer whose process is gone,
        RankLost with that peer's name is raised instead. `what`: the code, in messages.
        """
        try:
            yield
        except OdcError:
            raise
        except Exception as error:
            if _is_of_communication(error):
                try:
                    self.barrier.name_lost(what, error)
                except OfRanks:
                    self._enter(Phase.BROKEN)
                    raise
            raise

    def _break(self, purpose: str, error: BaseException) -> None:
        """A peer is lost or too late, or this rank must stop (Ctrl-C, exit): reports it without waiting."""
        self._enter(Phase.BROKEN)
        with contextlib.suppress(dist.DistError):  # the store may be what was lost
            self.barrier.post(purpose, {"error": describe(error), "follows": False})

    def abort(self, error: BaseException) -> None:
        """Tells peers that this rank's training loop ended by `error`, outside of a minibatch; does not wait."""
        if not self.is_broken:
            self._enter(Phase.BROKEN)
            with contextlib.suppress(dist.DistError):  # the store may be gone
                self.barrier.abort(describe(error))

    def require_peers(self, purpose: str) -> None:
        """Raises RankLost at once if a peer's process is gone. `purpose`: what this rank needs them for."""
        self.require_alive(range(self.world), purpose)

    def warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=4)
