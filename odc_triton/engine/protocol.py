"""The minibatch protocol of one rank: its two barriers, and the order of everything around them. Phases: member.py.

READY --begin()--> OPEN --end()--> REDUCED --optimizer step--> READY
      ^                  |                |
      |   (a microbatch raised: on all    |
      +---------- ranks) ----------+      +--begin(): without a step--> OPEN

Features take part by the hooks of minibatch.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from ..base.errors import (
    DeadlineExceeded,
    MinibatchFailed,
    MinibatchToRepeat,
    OdcError,
    RankLost,
    RanksDiffer,
    describe,
)
from .member import Member, Phase, Wiring
from .minibatch import Participant, SameSamples, Tokens
from .publication import Publication
from .shard import Shard, Zeros, clear_gradients, reduce_gradients
from .steps import OptimizerSteps

Kind = TypeVar("Kind", bound=Participant)


def _is_fatal(error: BaseException | None) -> TypeGuard[BaseException]:
    """True if a rank with this error can't wait at another barrier."""
    return isinstance(error, (RankLost, DeadlineExceeded)) or not isinstance(error, Exception | None)


def _messages_of(participant: Participant, messages: list[dict[str, Any]]) -> list[Any]:
    """By rank; None where a rank has no such participant, or this one no message."""
    parts = (theirs["parts"].get(participant.name) for theirs in messages)
    return [None if part is None else json.loads(part) for part in parts]


class Protocol(Member):
    """`failure`: why the open minibatch fails at its end, None if it does not. `deterministic`: a minibatch may
    have to be run again, see checkpoint/repeat.py.
    """

    deterministic = False
    backward_belongs = "put it into `with minibatch(model):`"  # what to do about one outside of a minibatch

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        self.failure: str | None = None
        self.is_serving = False  # see serving.py
        self.divide_factor: float | None = None  # set_gradient_divide_factor
        self.tokens = Tokens(self.world)
        self.publication = Publication(self)
        self.optimizers = OptimizerSteps(self, self.publication)
        self.participants: list[Participant] = []
        same = SameSamples(self.rank, self.world, is_alone=lambda: self.is_alone)
        self.register(self.tokens, same, self.optimizers, self.publication)
        self._zeros: Zeros | None = None  # at the entry of this minibatch, or of the one that is repeated
        self._lost: set[Shard] = set()

    def fail(self, reason: str) -> None:
        """Marks the open minibatch as failed; it fails on every rank at the exit."""
        self.failure = self.failure or reason

    @property
    def divides_by_ranks(self) -> bool:
        """True if gradients are divided by the number of ranks, as neither tokens nor a divisor were given."""
        return self.divide_factor is None and self.tokens.total is None and self.tokens.late_divisor is None

    @property
    def is_alone(self) -> bool:
        """True inside of `serving`: this rank reads the others' shards, and waits for none of them."""
        return self.is_serving and not any(each.needs_all_ranks for each in self.participants)

    def meet_in_step(self, purpose: str, message: dict[str, Any], error: BaseException | None) -> list[dict[str, Any]]:
        """The messages of all ranks that train together, by rank; of one that `is_alone` only its own."""
        if not self.is_alone:
            return self.meet(purpose, message, error)
        return [message | {"error": None if error is None else describe(error), "follows": False}]

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

    def begin(self, given: Callable[[], dict[str, Any]]) -> None:
        """Enters the next minibatch. `given`: makes the arguments of participants, by the names of these.

        Raises RankLost, DeadlineExceeded, RanksDiffer, MinibatchFailed (another rank could not enter).
        """
        self.refuse_in_child("a minibatch")
        if self.is_open:
            raise RuntimeError(f"minibatch {self.number} is still open: minibatches don't nest")
        self.refuse_broken()
        error: BaseException | None = None
        parts: dict[str, str] = {}
        try:
            wanted = given()
            self.refuse_unknown(wanted)
            parts = self._parts(lambda each: each.entry(wanted.get(each.name)))
            self._prepare()
        except BaseException as raised:
            if _is_fatal(raised):
                self.give_up(f"enter minibatch {self.number + 1}", raised)
                raise
            error = raised
        self.events.minibatch, self.events.microbatch = self.number + 1, -1
        messages = self.meet_in_step(f"enter minibatch {self.number + 1}", {"parts": parts}, error)
        self.number += 1
        self._raise_failures(messages, error)
        try:
            for each in self.participants:
                each.entered(_messages_of(each, messages))
        except RanksDiffer:
            self.enter(Phase.READY)
            raise
        self.failure = None
        self.enter(Phase.OPEN)
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
        if self.optimizers.outermost is not None:
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
        if not self.is_alone:  # else nothing is written, as others may be reading
            self.publication.prepare()
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
            self.give_up(purpose, error)
            raise error
        parts: dict[str, str] = {}
        try:
            self.drain(f"the microbatches of minibatch {self.number}")
            parts = self._parts(lambda each: each.exit())
        except Exception as raised:
            if _is_fatal(raised):
                self.give_up(purpose, error or raised)
                raise
            error = error or raised
        touched = [place for place, shard in enumerate(self.shards) if shard.touched]
        messages = self.meet_in_step(purpose, {"touched": touched, "zeros": zeros, "parts": parts}, error)
        self.events.microbatch = -1
        self._settle(messages, error)
        self._zeros = None
        zeros = set.intersection(*(set(theirs["zeros"]) for theirs in messages))
        self._reduce(zeros.union(*(theirs["touched"] for theirs in messages)))
        self.enter(Phase.REDUCED)
        for each in self.participants:
            each.reduced()

    def _leave(self, error: BaseException | None) -> tuple[BaseException | None, list[int]]:
        """Ends this rank's microbatches; returns its error, if any, and the places of gradients that stay zeros."""
        zeros = self._zeros.kept(self.shards) if self._zeros is not None else []
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
        causes = [None if theirs["follows"] else theirs["error"] for theirs in messages]
        if not any(cause is not None for cause in causes):
            causes = [theirs["error"] for theirs in messages]
        first = self.rank if len(messages) < self.world else 0
        failed = {rank: text for rank, text in enumerate(causes, first) if text is not None}
        if failed:
            self._zeros = None
            self._drop_gradients()
            raise MinibatchFailed(self.number, failed) from error

    def _drop_gradients(self) -> None:
        for shard in self.trainable():
            shard.drop()
        self.enter(Phase.READY)

    def _reduce(self, touched: set[int]) -> None:
        """Gives the optimizer the gradients of the shards at these places, and None for the others."""
        for place, shard in enumerate(self.shards):
            if shard.trains and place not in touched:
                shard.assign(None)
        shards = [self.shards[place] for place in sorted(touched)]
        factor = self.tokens.late_divisor or self.divide_factor or self.tokens.divisor
        with contextlib.ExitStack() as scope:
            if self.replicas.count > 1 and shards:
                scope.enter_context(self.collective())
                scope.enter_context(self.events.span("wait", label="sum over replicas", microbatch=-1))
            reduce_gradients(shards, factor, self.replicas, self.streams.first)
        self.drain("reducing the gradients")

    def publish(self) -> None:
        self.publication.publish()
