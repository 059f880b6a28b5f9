"""The minibatch protocol: what one rank may do when, and the two barriers that keep the ranks together.

The phases are in state.py.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.errors import (
    DeadlineExceeded,
    MinibatchFailed,
    MinibatchToRepeat,
    PeerFailed,
    RankLost,
    RanksDiffer,
    describe,
)
from ..comm.barrier import Barrier
from ..comm.grid import Grid
from ..comm.memory.heap import SymmetricHeap
from ..comm.replicas import Replicas
from .accumulation import undivided
from .entry import checked_tokens, compare_entries, trained_mask
from .exact import ExactSums
from .gradients import Waits
from .optimizer_watch import Hyperparameters, OptimizerWatch
from .parameter import ShardedParameter
from .passes import Passes, RefuseCollectives
from .publication import Publication, Zeros, clear_gradients, copy_masters, land_gradients
from .state import MinibatchState, NoSplits, Phase
from .streams import AllStreams, Streams
from .unit import Prefetch, Unit


def _waits_for_nobody(error: BaseException | None) -> bool:
    """Whether a rank with this error does not meet the others again."""
    return isinstance(error, (RankLost, DeadlineExceeded)) or not isinstance(error, Exception | None)


class Engine:
    """One sharded model on one rank: its units, its parameters, its place in the protocol."""

    def __init__(
        self,
        *,
        grid: Grid,
        heap: SymmetricHeap,
        replicas: Replicas,
        streams: Streams,
        barrier: Barrier,
        adds_by_kernel: bool,
        exact: bool,
        debug: bool,
    ) -> None:
        """`adds_by_kernel`: kernels add to peers, on `streams`; else the host does, under locks. `exact`: the sums of
        gradients are integers, see exact.py.
        """
        self.grid, self.heap, self.replicas = grid, heap, replicas
        self.barrier, self.adds_by_kernel, self.exact, self.debug = barrier, adds_by_kernel, exact, debug
        self.streams = AllStreams(streams, timeout_s=barrier.timeout_s)
        self.publication = Publication(heap, barrier)
        self.rank, self.world = grid.rank, grid.world
        self.state = MinibatchState(rank=self.rank, barrier=barrier, publication=self.publication)
        self.events = self.state.events
        self.units: list[Unit] = []
        self._exact_sums: ExactSums | None = None  # None where parameters or names are new
        self.parameters: list[ShardedParameter] = []  # the protocol uses them as `Sharded`: sharded.py
        self.prefetch = Prefetch()
        self.passes = Passes(
            self.state,
            self.streams,
            self.units,
            owners=range(grid.first, grid.first + grid.shards),
            nothing_follows=self.prefetch.expect_nothing,
        )
        self.divide_factor: float | None = None  # set_gradient_divide_factor
        self._tokens: int | None = None
        self._step_start_s = 0.0
        self._stepping: int | None = None  # the id of the optimizer whose step is running, the outermost
        self.ignored: dict[int, nn.Parameter] = {}  # what fully_shard was told to leave alone, by id
        self._warned: set[str] = set()
        self._scope = contextlib.ExitStack()
        self._zeros: Zeros | None = None  # at the entry of this minibatch, or of the one that is repeated
        self.hyperparameters = Hyperparameters()
        self._optimizers = OptimizerWatch(self)
        self.splits = NoSplits()  # until `split_by`

    # ------------------------------------------------------------------ parameters

    def add(self, parameters: list[ShardedParameter]) -> None:
        self._exact_sums = None
        for parameter in parameters:
            self.parameters.append(parameter)
            self.streams.watch(parameter.staging)
            if parameter.trains:
                parameter.listen(self)

    def absorb(self, inner: Engine) -> None:
        """Takes over a submodule that was sharded before its root; its parameters stay where they are."""
        for unit in inner.units:
            unit.join(self.passes, self.prefetch)
            unit.module._odc_engine = self
        self.units += inner.units
        self.streams.join(inner.streams)
        self.add(inner.parameters)
        inner.retire()

    def name_parameters(self, root: nn.Module) -> None:
        """Names every parameter as seen from the root."""
        names = {id(value): name for name, value in root.named_parameters()}
        for parameter in self.parameters:
            parameter.name = names[id(parameter.sharded)]
        self._exact_sums = None

    def originals(self) -> Iterator[tuple[nn.Parameter, ShardedParameter]]:
        """Parameters as they were before sharding, where something still holds them: a tie into this module."""
        for parameter in self.parameters:
            original = parameter.original() if parameter.original is not None else None
            if original is not None:
                yield original, parameter

    def gradient_comes(self, parameter: ShardedParameter) -> None:
        self.passes.backward_begins(self.state.number)

    def waited(self, parameter: ShardedParameter, waits: Waits) -> None:
        for start_s, end_s in waits:
            self.events.add("wait", start_s, end_s, label=f"lock of {parameter.name}")

    def exact_sums(self) -> ExactSums:
        """Of all parameters that train. Without `exact` there are none."""
        if self._exact_sums is None:
            trained = [(place, p) for place, p in enumerate(self.parameters) if self.exact and p.trains]
            sums, names = {place: p.storage.exact for place, p in trained}, {place: p.name for place, p in trained}
            self._exact_sums = ExactSums(sums, names)
        return self._exact_sums

    def split_by(self, splits: Any) -> None:
        """From now on `splits` computes pieces of sequences with other ranks."""
        self.splits = splits
        self.streams.also(splits.streams)
        self.streams.watch(splits.sync)

    def trainable(self) -> list[ShardedParameter]:
        return [parameter for parameter in self.parameters if parameter.trains]

    # ------------------------------------------------------------------ the minibatch

    def begin(self, tokens: int | None, split: Any = None) -> int | None:
        """Enters the next minibatch; returns the tokens of all ranks, None where none were given.

        `split`: the plan of its pieces of sequences. Raises RankLost, DeadlineExceeded, RanksDiffer, MinibatchFailed
        (another rank could not enter).
        """
        self.state.refuse_in_child("a minibatch")
        if self.state.is_open:
            raise RuntimeError(f"minibatch {self.state.number} is still open: minibatches don't nest")
        if self.state.is_broken:
            raise RuntimeError("an earlier barrier of this model's ranks failed; start again from the last checkpoint")
        error: BaseException | None = None
        try:
            tokens = checked_tokens(tokens)
            self.splits.check(split)
            self._prepare()
        except Exception as raised:
            error = raised
        number = self.state.number + 1
        message = {
            "tokens": None if error else tokens,
            "published": self.publication.number,
            "stepped": self.hyperparameters.digest(),
            "trained": trained_mask(self.parameters),
            "split": getattr(split, "digest", None),
            "scales": self.exact_sums().digest() if self.exact else None,
        }
        self.events.minibatch, self.events.microbatch = number, -1
        messages = self._exchange(f"enter minibatch {number}", message, error)
        self.state.number = number
        self._settle(messages, error)
        try:
            self._tokens = compare_entries(messages, self.parameters, self.hyperparameters, self.exchange)
        except RanksDiffer:
            self._stay_outside()
            raise
        self.exact_sums().clear()
        self.publication.agree(max(theirs["published"] for theirs in messages))
        self.passes.count, self.state.failure = 0, None
        for unit in self.units:
            unit.expire()
            unit.watch_edits()
        self.state.enter(Phase.OPEN)
        self.splits.begin(split)
        for parameter in self.trainable():
            parameter.landing.expect_gradient()
        if self._tokens is not None:
            self._scope.enter_context(undivided())
        if self.debug:
            self._scope.enter_context(RefuseCollectives())
        return self._tokens

    def _prepare(self) -> None:
        """This rank's side of entering: gradient shards are zero, masters are published."""
        if self.passes.in_forward:
            raise RuntimeError("a minibatch can't begin inside a forward of the model")
        if self._stepping is not None:
            raise RuntimeError(
                "a minibatch can't begin: an optimizer step has begun and not ended. Don't run it in step(closure); "
                "and after a step that raised, start again from the last checkpoint"
            )
        for unit in self.units:
            unit.check_places()
        if torch.are_deterministic_algorithms_enabled() and not self.exact:
            raise RuntimeError(
                "torch.use_deterministic_algorithms(True) came after fully_shard, and this model's gradients are added "
                "in the order of their arrival: set it before, or give fully_shard(model, exact=True)"
            )
        self._refuse_added()
        for parameter in self.parameters:
            parameter.follow_requires_grad()
        if self.state.phase is Phase.LANDED and any(p.landing.has_gradient for p in self.parameters):
            self._warn_once(
                "dropped",
                f"the gradients of minibatch {self.state.number} are dropped: no optimizer step followed it. "
                f"Put all microbatches of a step into one minibatch.",
            )
        self._zeros = self._zeros or Zeros(self.parameters)
        clear_gradients(self.trainable(), self.streams.first)
        for parameter in self.parameters:
            parameter.landing.check_memory(parameter.name)
        if not self._exchanges:  # else what was written by hand needs an exchange: publish(model)
            copy_masters(self.parameters, self.streams.first)
        self.drain("clearing gradients and publishing before a minibatch")

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the minibatch: all gradients have landed when it returns.

        `error`: what a microbatch raised. Raises MinibatchFailed on every rank if any rank failed.
        """
        self.state.refuse_in_child("the end of a minibatch")
        if not self.state.is_open:
            raise RuntimeError(
                f"no minibatch is open (the engine is {self.state.phase.name}): call begin_minibatch first"
            )
        self._scope.close()
        self.passes.stop()
        kept = self._zeros.kept(self.parameters)
        given = [parameter.name for parameter in self.trainable() if parameter.landing.expect_no_more()]
        if given:
            self.state.fail(
                f"p.grad of {given[0]} was assigned inside the minibatch, but the ranks' sum replaces it at the "
                f"end: assign it after the `with minibatch(...)` block"
            )
        for unit in self.units:
            unit.reset()
        purpose = f"leave minibatch {self.state.number}"
        try:
            for unit in self.units:
                unit.refuse_edits()
        except RuntimeError as edited:
            error = error or edited
        if error is None and self.state.failure is None:
            self.state.failure = self.splits.incomplete()
        if error is None and self.state.failure is not None:
            error = RuntimeError(self.state.failure)
        if error is not None:
            self.splits.fail()
        if _waits_for_nobody(error):
            self._leave(purpose, error)
            return
        try:
            self.drain(f"the microbatches of minibatch {self.state.number}")
        except Exception as raised:
            if error is None and _waits_for_nobody(raised):
                self._leave(purpose, raised)
                raise
            error = error or raised
        touched = [index for index, parameter in enumerate(self.parameters) if parameter.landing.touched]
        exact = self.exact_sums()
        message = {"touched": touched, "zeros": kept, "microbatches": self.passes.count}
        if self.exact:
            message["sums"] = exact.told(touched)
        messages = self._exchange(purpose, message, error)
        self.events.microbatch = -1
        self.splits.end(failed=any(theirs["error"] is not None for theirs in messages))
        self._settle(messages, error)
        refused, not_finite = exact.settle(messages) if self.exact else ({}, set())
        if refused:
            self._drop_gradients()
            names = {self.parameters[place].name: why for place, why in refused.items()}
            raise MinibatchToRepeat(self.state.number, names)
        self._zeros = None
        with self._together():
            zeros = set.intersection(*(set(theirs["zeros"]) for theirs in messages))
            self._land(zeros.union(*(theirs["touched"] for theirs in messages)))
        for place in not_finite:
            self.parameters[place].sharded.grad.to_local().fill_(math.nan)
        self.state.enter(Phase.LANDED)
        counts = [theirs["microbatches"] for theirs in messages]
        if self._tokens is None and self.divide_factor is None and len(set(counts)) > 1:
            self._warn_once(
                "counts",
                f"ranks ran {counts} microbatches in minibatch {self.state.number} and gradients are divided by the "
                f"number of ranks; give tokens= to minibatch() and divide the loss by mb.tokens",
            )

    def _leave(self, purpose: str, error: BaseException) -> None:
        """A peer is lost or too late, or this rank must stop (Ctrl-C, exit): tells peers, waits for nobody."""
        self.state.enter(Phase.BROKEN)
        with contextlib.suppress(torch.distributed.DistError):  # the store may be what was lost
            self.barrier.post(purpose, {"error": describe(error), "follows": False})

    def _land(self, touched: set[int]) -> None:
        factor = self.divide_factor or (self.world if self._tokens is None else 1)
        for index, parameter in enumerate(self.parameters):
            if parameter.trains and index not in touched:
                parameter.landing.land(None)
        with contextlib.ExitStack() as scope:
            if self.replicas.count > 1:
                scope.enter_context(self.events.span("wait", label="sum over replicas", microbatch=-1))
            parameters = [self.parameters[index] for index in sorted(touched)]
            land_gradients(parameters, factor, self.replicas, self.streams.first)
        self.drain("taking the landed gradients")

    def _refuse_added(self) -> None:
        """Raises for parameters that came after fully_shard: each rank would train its own copy of them."""
        for root in [unit.module for unit in self.units if unit.is_root]:
            known = {id(each) for parameter in self.parameters for each in (parameter.sharded, parameter.leaf)}
            for name, value in root.named_parameters():
                if value.requires_grad and id(value) not in known and id(value) not in self.ignored:
                    raise RuntimeError(
                        f"{name} was added after fully_shard, so its gradient would stay on this rank and the copies "
                        f"would drift apart: add it before (first get_peft_model, then fully_shard), or freeze it"
                    )

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Around what replicas do together: a rank that leaves it early lets the others know."""
        try:
            yield
        except BaseException:
            if self.replicas.count > 1:
                self.state.enter(Phase.BROKEN)
            raise

    def _exchange(self, purpose: str, message: dict[str, Any], error: BaseException | None) -> list[dict[str, Any]]:
        message |= {"error": None if error is None else describe(error), "follows": isinstance(error, PeerFailed)}
        try:
            with self.events.span("wait", label=purpose, microbatch=-1):
                return self.barrier.exchange(purpose, message)
        except BaseException:
            self.state.enter(Phase.BROKEN)
            raise

    def exchange(self, purpose: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """A training loop's own barrier, outside of minibatches; returns all ranks' messages, which are JSON.

        Raises RankLost, DeadlineExceeded.
        """
        if self.state.is_broken:
            raise RuntimeError("an earlier barrier of this model's ranks failed; start again from the last checkpoint")
        return self._exchange(purpose, message, None)

    def require_peers(self, purpose: str) -> None:
        """Raises RankLost at once if a peer's process is gone. `purpose`: what this rank needs them for."""
        self.state.require_alive(range(self.world), purpose)

    def abort(self, error: BaseException) -> None:
        """Tells peers that this rank's training loop ended by `error`, outside of a minibatch; waits for nobody."""
        if not self.state.is_broken:
            self.state.enter(Phase.BROKEN)
            with contextlib.suppress(torch.distributed.DistError):  # the store may be gone
                self.barrier.abort(describe(error))

    def _settle(self, messages: list[dict[str, Any]], error: BaseException | None) -> None:
        """Raises MinibatchFailed on all ranks if any of them brought an error to the barrier."""
        failed = {rank: theirs["error"] for rank, theirs in enumerate(messages) if theirs["error"] is not None}
        failed = {rank: text for rank, text in failed.items() if not messages[rank]["follows"]} or failed
        if failed:
            self._zeros = None
            self._drop_gradients()
            raise MinibatchFailed(self.state.number, failed) from error

    def _drop_gradients(self) -> None:
        for parameter in self.trainable():
            parameter.landing.drop()
        self._stay_outside()

    def _stay_outside(self) -> None:
        """The minibatch ends before it opened, or without gradients."""
        self.state.enter(Phase.READY)

    def drain(self, purpose: str) -> None:
        """Waits until this rank's device has done what was enqueued; peers are told next."""
        try:
            self.streams.drain(purpose)
        except DeadlineExceeded as error:
            self.barrier.late(purpose, error)

    @property
    def _exchanges(self) -> bool:
        """Whether each replica publishes only its parts of the shards, so that publishing needs all of them."""
        return self.replicas.count > 1 and any(parameter.is_split for parameter in self.parameters)

    @property
    def is_open(self) -> bool:
        """Whether a minibatch is open."""
        return self.state.is_open

    # ------------------------------------------------------------------ publishing

    def publish(self, *, stepped: bool = False) -> None:
        """Makes this rank's shards readable as they are now, and says so. Called after every optimizer step.

        With replicas all ranks call it, as each has a part of every replica's shards. `stepped`: called by an
        optimizer's step, so frozen parameters are unchanged.
        """
        self.state.refuse_in_child("publish")
        if self.state.is_open:
            raise RuntimeError("parameters can't be published inside a minibatch: peers are reading them")
        self.publication.announce()  # before the copies
        with self.events.span("publish", microbatch=-1):
            for parameter in self.parameters:
                parameter.landing.check_memory(parameter.name)
            if not self._exchanges:
                copy_masters(self.parameters, self.streams.first)
            else:
                with self._together():
                    self._copy_between_replicas(self.trainable() if stepped else self.parameters)
            self.drain("publishing the parameters")
        self.publication.complete()

    def _copy_between_replicas(self, parameters: list[ShardedParameter]) -> None:
        copy_masters(parameters, self.streams.first)
        self.drain("publishing the own part of the parameters")
        self.replicas.gather_parts([each.storage.compute_parts() for each in parameters if each.is_split])

    def full_parameters(self, some: list[ShardedParameter] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, a copy of the whole tensor in the compute dtype), one at a time, of all or `some`; no other rank
        takes part."""
        published = self.publication.number
        for parameter in self.parameters if some is None else some:
            if not self.state.is_open:
                self.publication.wait_readable()
            wholes = parameter.wholes()
            self.drain("reading whole parameters")
            if not self.state.is_open:
                self.publication.check_not_torn()
            if self.publication.number != published:
                raise RuntimeError("the parameters were stepped or published during this walk: start a new one")
            yield from wholes

    # ------------------------------------------------------------------ optimizers

    def step_begins(self, optimizer: Optimizer) -> None:
        self.state.refuse_in_child("an optimizer step")
        if self.state.is_open:
            raise RuntimeError(
                "optimizer step inside a minibatch: gradients have not landed and peers are reading the parameters. "
                "Step after the `with minibatch(...)` block."
            )
        if self.state.is_broken:
            raise RuntimeError("the ranks have lost each other; this step would use partial gradients")
        if self._stepping not in (None, id(optimizer)):  # an optimizer of others, which publishes when all have stepped
            return
        self._step_start_s = time.monotonic()
        self._stepping = id(optimizer)
        self.publication.announce()

    def step_ends(self, optimizer: Optimizer) -> None:
        if self._stepping != id(optimizer):
            return
        self.events.add("step", self._step_start_s, time.monotonic(), microbatch=-1)
        self._stepping = None
        self.state.enter(Phase.READY)
        self.publish(stepped=True)

    # ------------------------------------------------------------------ odds

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=4)

    def retire(self) -> None:
        """Stops listening: another engine drives these parameters from now on."""
        self._optimizers.stop()
