"""Minibatches that begin and end by themselves: `use_odc(model, automatic=True)`.

A minibatch begins with the first forward that makes a graph. It ends where a gradient is used: by clipping, by a
GradScaler, by anything that reads `p.grad`, and at the latest by the step of an optimizer that holds one of the
parameters. So it has all backwards of a step, however often FSDP2 would have reduced, and ranks may run different
numbers of them. A rank that runs none enters and leaves it where it uses its gradients.

[Note: eager] Where a hook waits for each gradient, or the user asks for it, a minibatch ends with the backward in which
FSDP2 would reduce, and `p.grad` accumulates over minibatches. Ranks then run as many such backwards as each other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.errors import RanksDiffer
from ..engine.minibatch import Participant
from ..engine.protocol import Protocol
from ..engine.shard import PendingGradient, versions_of
from ..engine.unit import Passes, in_backward_pass
from .noticed import MAKING_STATES, ZEROING, Noticing
from .unit import BridgedParameter, weakly
from .waiting import GradientInWaiting

How = Literal["lazy", "eager"]
Kind = Literal["gradient", "step", "backward", "zero_grad", "load_state_dict"]

_WHERE: dict[Kind, str] = {
    "gradient": "a gradient was used",
    "step": "an optimizer stepped",
    "backward": "a backward ended",
    "zero_grad": "gradients were zeroed before a step",
    "load_state_dict": "a state_dict was loaded",
}
_OURS = ("torch", "odc_triton")


def how_of(automatic: bool | str) -> How | None:
    """The way that `use_odc(automatic=…)` asks for; None for none. Raises ValueError for another value."""
    if automatic is False or automatic is None:
        return None
    if automatic is True:
        return "lazy"
    if automatic == "eager":
        return "eager"
    raise ValueError(f'automatic is {automatic!r}; give True, False or "eager"')


def _caller() -> str:
    """The line of the user's program that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass
class Counts:
    """`minibatches` so far, and how often ranks waited for each other, at their begin and end and elsewhere."""

    minibatches: int = 0
    waits: int = 0

    def __str__(self) -> str:
        plural = "" if self.minibatches == 1 else "es"
        return f"{self.minibatches} minibatch{plural}, {self.waits} waits"


class Automatic(Participant):
    """Begins and ends the minibatches of one model."""

    name = "automatic"

    def __init__(
        self, model: nn.Module, engine: Protocol, passes: Passes, shards: Sequence[BridgedParameter], how: How
    ) -> None:
        self._engine, self._passes, self._how = engine, passes, how
        self._trained = [each for each in shards if each.trains]
        self._use = weakly(self.use)
        self.counts = Counts()
        self._passed_before = engine.barrier.passed
        self._syncs = True  # set_requires_gradient_sync and set_is_last_backward
        self._is_last = True
        self._kept: dict[BridgedParameter, tuple[torch.Tensor, torch.Tensor]] = {}  # p.grad before, and its values
        self._ends_at: tuple[Kind, str] | None = None  # while it ends
        self._is_eager = False  # the open minibatch is
        self._makes_states = False  # DCP does, of an optimizer that has not stepped
        self._in_backward = False  # one that is running, or has failed
        self._reads = False  # `generate` runs, which has looked for what was written
        self._stepped_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        for each in self._shards:
            each.zero_instead = "Zero it by optimizer.zero_grad() or model.zero_grad(), which are noticed"
        engine.optimizers.before_step = self._before_step
        engine.mute("counts")  # how losses are divided is the program's
        engine.backward_belongs = (
            "its forward ran before the last minibatch ended, or under no_grad, as by a reentrant checkpoint of the "
            "whole model: run it again, or all backwards before gradients are used"
        )
        vars(model)["_apply"] = partial(self._apply_to, model)
        model.register_load_state_dict_pre_hook(lambda *_: self._before_load())
        for name, method in [*vars(model).items()]:
            if getattr(getattr(method, "__code__", None), "co_name", "") == "wrapped_method":
                vars(model)[name] = partial(self._forward_method, method)  # of register_fsdp_forward_method
            elif name == "generate":
                vars(model)[name] = partial(self._generate, method)
        self.noticing = [Noticing(self, *each) for each in (*ZEROING, MAKING_STATES)]
        self.rest()

    @property
    def _shards(self) -> list[BridgedParameter]:
        """What trains; of tied ones that whose `p.grad` is the others', too."""
        return [each for each in self._trained if each.tied_to is None]

    def follow_sync(self, modules: Iterable[Any]) -> None:
        """From now on FSDP2's own signals are noted, and a backward adds to the owners whatever they say. `modules`:
        the root, and the others.
        """
        root, *units = modules
        vars(root)["set_requires_gradient_sync"] = self._set_syncs
        vars(root)["set_is_last_backward"] = self._set_is_last
        for unit in units:
            vars(unit)["set_requires_gradient_sync"] = vars(unit)["set_is_last_backward"] = _ignored

    def _set_syncs(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        self._syncs = requires_gradient_sync

    def _set_is_last(self, is_last_backward: bool) -> None:
        self._is_last = is_last_backward

    # ---- what begins and ends a minibatch

    def before_forward(self) -> None:
        """A unit's forward is about to run."""
        if in_backward_pass():
            return
        self._in_backward = False
        if self._engine.is_open or self._passes.in_forward:
            return
        if torch.is_grad_enabled() and self._trained:
            self._begin()
        elif not self._reads:
            self._publish_written()

    def _forward_method(self, method: Callable[..., Any], *args: Any, **given: Any) -> Any:
        self.before_forward()  # before FSDP2 makes the root whole
        return method(*args, **given)

    def _generate(self, generate: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Looks once for what was written, not for each token."""
        self._publish_written()
        self._reads = True
        try:
            return generate(*args, **given)
        finally:
            self._reads = False

    def _publish_written(self) -> None:
        """Makes readable what the program wrote into parameters, as it does on all ranks, once none is reading."""
        if self._engine.is_open:
            return
        shards = self._engine.shards
        if any(versions_of(each.sharded) != each.versions for each in shards) or not all(
            each.is_as_published()
            for each in shards  # values: `p.data` and torch._foreach have no versions
        ):
            self._engine.exchange("parameters were written, other than by an optimizer", {})
            self._engine.publish()

    def before_backward(self) -> None:
        """A backward through a unit's output is running."""
        if self._in_backward or not self._engine.is_open:  # or inside of another, as of a reentrant checkpoint
            return
        self._in_backward = True
        self._forget_zeroed()
        queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._after_backward))  # after FSDP2's own and the engine's

    def _after_backward(self) -> None:
        self._in_backward = False
        for each in self._shards:
            if each.is_shared and self._engine.is_open:
                each.show_pending()  # which it does not where FSDP2 may set p.grad twice
        if self._is_eager and self._syncs and self._is_last and self._engine.is_open:
            self._end("backward")

    def use(self, number: int, shard: BridgedParameter) -> None:
        """A gradient of minibatch `number` is used: it ends on all ranks."""
        engine, name = self._engine, shard.name
        if engine.is_open and engine.number == number:
            if in_backward_pass():
                raise RuntimeError(
                    f"p.grad of {name} is used inside a backward, before the ranks have summed it: use it after the "
                    f'backward, or in a post-accumulate-grad hook, with use_odc(model, automatic="eager")'
                )
            self._end("gradient")
        elif not engine.is_open and engine.number < number:
            self._join("gradient")
        elif engine.number > number or (shard.was_summed and isinstance(shard.sharded.grad, PendingGradient | None)):
            raise RuntimeError(
                f"a gradient of {name} was kept from minibatch {number} and not used before zero_grad(), or the next "
                f"minibatch: read p.grad again, or clone it before"
            )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict) -> tuple[tuple, dict] | None:
        """Ends the minibatch before an optimizer steps; one without a minibatch since its last step joins the others'.

        Returns the arguments of `step` that take the place of a closure: it has run.
        """
        if self._makes_states:
            return None
        closure, changed = kwargs.get("closure", next(iter(args[1:]), None)), None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            others = {name: value for name, value in kwargs.items() if name != "closure"}
            changed = (optimizer, _once(loss, type(optimizer).__name__), *args[2:]), others
        for each in self._shards:
            each.drop_zeros()
        if self._engine.is_open:
            self._end("step")
        elif self._is_without(optimizer):
            self._join("step")
        self._stepped_at[optimizer] = self._engine.number
        return changed

    def _is_without(self, optimizer: Optimizer) -> bool:
        """This rank has no gradients for it since they were zeroed, or since its last step."""
        shards = self._held_by(optimizer)
        waiting = any(isinstance(each.sharded.grad, PendingGradient) for each in shards)
        return waiting or self._stepped_at.get(optimizer, -1) == self._engine.number

    def _before_load(self) -> None:
        if self._engine.is_open:
            self._end("load_state_dict")

    def _begin(self) -> None:
        self._publish_written()
        self._kept, zeroed = {}, set()
        for each in self._shards:
            each.drop_zeros()
            gradient = each.sharded.grad
            if isinstance(gradient, PendingGradient):
                zeroed |= {each} if gradient.zeroed else set()
            elif gradient is not None and each.tied_to is None:
                self._kept[each] = gradient, gradient.detach().clone()
        for each in self._shards:
            each.sharded.grad = None
        self._is_eager = self._how == "eager" or any(each.has_hooks for each in self._shards)
        number = self._engine.number + 1
        try:
            self._engine.begin(lambda: {self.name: "eager" if self._is_eager else "lazy"})
        except BaseException:
            self._kept = {}
            self.rest()
            raise
        for each in self._shards:
            self._wait_for(each, number, zeroed=each in zeroed)
        for each in self._kept:
            each.pending.adds = True

    def _wait_for(self, shard: BridgedParameter, number: int, *, zeroed: bool = False) -> None:
        """`p.grad` is that of minibatch `number`."""
        if shard.tied_to is None:
            shard.pending = GradientInWaiting.of(shard, self._use, number, zeroed=zeroed)
            shard.sharded.grad = None
            shard.show_pending()

    def _end(self, kind: Kind) -> None:
        self._ends_at = kind, _caller()
        zeroed = [each for each in self._shards if each.pending.zeroed]
        try:
            self._engine.end()
        except BaseException:
            for each in self._trained:
                each.touched = False  # the sums are dropped
            self.rest()
            raise
        finally:
            self._ends_at, self._kept = None, {}
        self.counts.minibatches += 1
        self.counts.waits = self._engine.barrier.passed - self._passed_before
        for each in zeroed:
            if each.sharded.grad is None:
                each.sharded.grad = torch.zeros_like(each.sharded.detach())
        # Where one rank reads a gradient and then all clip, the others have collected what was not None before they get
        # here.
        for each in self._shards if kind == "gradient" else ():
            each.show_zeros()

    def add_kept(self) -> None:
        """What `p.grad` had before the minibatch, once it has the ranks' sum and before the user's hooks see it. It is
        the tensor that it was: clipping may have collected it before the gradient that makes this rank join.
        """
        for each, (gradient, before) in self._kept.items():
            if each.sharded.grad is not None:
                before.add_(each.sharded.grad)
            each.sharded.grad, each.dirty = gradient, True
            gradient.detach().copy_(before)

    def _join(self, kind: Kind) -> None:
        """A minibatch without a microbatch of this rank."""
        self._begin()
        self._end(kind)

    # ---- gradients that are zeroed

    def rest(self, shards: Sequence[BridgedParameter] | None = None) -> None:
        """No minibatch is open: gradients, of `shards` or all, that are None are the next one's, so that a rank that
        runs no microbatch does with them what the others do.
        """
        for each in self._shards if shards is None else shards:
            if each.sharded.grad is None and each.sharded.requires_grad:
                self._wait_for(each, self._engine.number + 1)

    def before_zero_grad(self, of: Optimizer | nn.Module) -> None:
        """Gradients of a backward are thrown away: on all ranks."""
        engine = self._engine
        if engine.is_open and not in_backward_pass() and (engine.failure or self._passes.count) and self._held_by(of):
            self._end("zero_grad")

    def after_zero_grad(self, of: Optimizer | nn.Module) -> None:
        """`p.grad` of its parameters is None, or zeros."""
        if not (shards := self._held_by(of)):
            return
        self._forget_zeroed()
        if self._engine.is_open:
            for each in self._shards:
                each.show_pending()
            return
        for each in shards:
            each.drop_zeros()
            if not isinstance(each.sharded.grad, PendingGradient | None):
                self._wait_for(each, self._engine.number + 1, zeroed=True)
        self.rest(shards)

    def _held_by(self, of: Optimizer | nn.Module) -> list[BridgedParameter]:
        own = of.parameters() if isinstance(of, nn.Module) else chain(*(group["params"] for group in of.param_groups))
        held = {id(parameter) for parameter in own}
        return [each for each in self._shards if id(each.sharded) in held]

    def _forget_zeroed(self) -> None:
        """Drops what p.grad had before the minibatch where it was zeroed since."""
        for each in self._shards:
            if each.sharded.grad is None:
                each.pending.adds = each.pending.zeroed = False
            if not each.pending.adds or each.pending.zeroed:
                self._kept.pop(each, None)

    def before_init_optim_state(self, of: Optimizer) -> None:
        """DCP leaves an optimizer without states where it finds a gradient, and would then load none."""
        self._makes_states = True
        self._drop_waiting(self._held_by(of))

    def after_init_optim_state(self, of: Optimizer) -> None:
        self._makes_states = False
        if not self._engine.is_open:
            self.rest()

    def _apply_to(self, model: nn.Module, convert: Callable[..., Any], recurse: bool = True) -> Any:
        """`model.to(…)` and its like convert gradients too, which those of the next minibatch are not yet."""
        if self._engine.is_open:
            self._end("gradient")
        zeroed = [each for each in self._shards if getattr(each.sharded.grad, "zeroed", False)]
        self._drop_waiting(self._shards)
        try:
            return type(model)._apply(model, convert, recurse)
        finally:
            for each in zeroed:
                self._wait_for(each, self._engine.number + 1, zeroed=True)
            self.rest()

    def _drop_waiting(self, shards: list[BridgedParameter]) -> None:
        for each in shards:
            each.drop_zeros()
            if isinstance(each.sharded.grad, PendingGradient) and not self._engine.is_open:
                each.sharded.grad = None

    # ---- the other ranks

    def entry(self, given: How | None) -> How:
        if given is None:
            raise RuntimeError(
                "this model's minibatches begin and end by themselves, use_odc(model, automatic=True): leave "
                "`minibatch` out, or `automatic`"
            )
        return given

    def entered(self, messages: list[How]) -> None:
        if len(set(messages)) > 1:
            eager = [rank for rank, how in enumerate(messages) if how == "eager"]
            raise RanksDiffer(
                f"only on ranks {eager} minibatches end with the backward, as of post-accumulate-grad hooks: register "
                f"them on all ranks or on none"
            )

    def exit(self) -> tuple[Kind, str]:
        if self._ends_at is None:
            raise RuntimeError(
                "end_minibatch of a model whose minibatches end by themselves, use_odc(model, automatic=True): leave "
                "it out"
            )
        return self._ends_at

    def settle(self, messages: list[tuple[Kind, str]] | None) -> None:
        if messages is None or len({kind for kind, _ in messages}) == 1:
            return
        ends = "; ".join(f"rank {rank}: {_WHERE[kind]}, {place}" for rank, (kind, place) in enumerate(messages))
        raise RanksDiffer(
            f"minibatch {self._engine.number} ended in different places. {ends}. Gradients are summed where they are "
            f"first used, which every rank must do: read, clip, zero and step them on all ranks or on none"
        )


def _ignored(value: bool, *, recurse: bool = True) -> None:
    """In place of a unit's own signals."""


def _once(loss: Any, optimizer: str) -> Callable[[], Any]:
    """A closure that has run, and returned `loss`."""
    left = chain([loss])

    def closure() -> Any:
        for value in left:
            return value
        raise RuntimeError(
            f"{optimizer}.step(closure) calls its closure more than once, with other parameters each time, which can't "
            f"be combined with on-demand communication: take an optimizer that calls it once"
        )

    return closure
