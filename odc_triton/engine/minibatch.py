"""A minibatch as a training loop opens it, and the hooks by which features take part in it.

And the parts that every engine has: target tokens, which parameters train, the order of additions.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..base.errors import RanksDiffer
from .shard import Shard

if TYPE_CHECKING:
    from ..plan.segments import SplitPlan


def protocol_of(module: nn.Module) -> Any:
    """The `Protocol` behind a module that `fully_shard` or `use_odc` returned."""
    if (protocol := getattr(module, "_odc_engine", None)) is None:
        raise TypeError(
            f"{type(module).__name__} is not sharded: call fully_shard(model) first, and give what it returns"
        )
    return protocol


class Planned(Protocol):
    """A rank's part of a plan. `tokens`: its targets; `split`: the plan of segments, None if there are none; `plan`:
    with `checksum`, `digest` and `ranks`. Each is None if it is unknown.
    """

    rank: int | None
    tokens: int | None
    plan: Any

    @property
    def split(self) -> Any: ...


class minibatch:
    """One optimizer step's microbatches of this rank, any number of them.

        with minibatch(model, tokens=count(packs)) as mb:
            for pack in packs:
                (summed_loss(model, pack) / mb.tokens).backward()

    Enter: waits until every rank's parameters are readable and its gradient shards are zero. Exit: waits until every
        rank's gradients are reduced; `p.grad` is then this rank's shard of the sum, or None on all ranks if no rank
        touched p. Inside, ranks never wait for each other.

    Inside of `serving(model)`, where nothing that is sharded trains, ranks have nothing to wait for: each opens
    minibatches of its own, or none at all, and tokens are its own.

    model: what `fully_shard` or `use_odc` returned.
    tokens: this rank's target tokens; `mb.tokens` is then their sum over all ranks and gradients are summed. Without it
        gradients are divided by the world size, as FSDP2 does, and `mb.tokens` raises RuntimeError. Give it on all
        ranks or on none.
    split: `packs.split`, the plan of packs that hold segments of sequences (`enable_split`).
    plan: in place of both, what a MinibatchSampler yields or `pack_collate` makes of it, or a function that returns it,
        whose error fails the minibatch on all ranks. Ranks that have other samples, or assign them in another way, are
        then found. Where `tokens` are given too, they count.

    Raises MinibatchFailed on every rank if a microbatch raised on any; RankLost if a peer's process is gone;
    DeadlineExceeded if a live peer is later than the `timeout` of fully_shard.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: int | None = None,
        *,
        split: SplitPlan | None = None,
        plan: Planned | Callable[[], Planned] | None = None,
    ) -> None:
        self._engine = protocol_of(model)
        self._given = partial(_arguments, tokens, split, plan)
        self._tokens: int | None = None
        self.index: int | None = None  # the number of this minibatch, from 0, the same on every rank

    def __enter__(self) -> minibatch:
        self._engine.begin(self._given)
        self._tokens, self.index = self._engine.tokens.total, self._engine.number
        return self

    @property
    def tokens(self) -> int:
        """The target tokens of all ranks together. Raises RuntimeError if no rank gave its own, or before entry."""
        if self._tokens is None:
            raise RuntimeError(
                "mb.tokens is not known: give this rank's number of target tokens, minibatch(model, tokens=…), and "
                "read it inside the `with` block"
            )
        return self._tokens

    def divide_by(self, number: float) -> None:
        """Divides the sums of the gradients by `number`, above 0, at the exit: for a mean whose denominator is known
        only inside. Call it there, on all ranks, with the same number. Raises ValueError for 0 or less, RuntimeError
        outside.
        """
        if self._engine.number != self.index or not self._engine.is_open:
            raise RuntimeError("divide_by outside of its minibatch: call it inside of the `with` block")
        if not 0 < number < math.inf:
            raise ValueError(f"divide_by has {number!r}; give a finite number above 0")
        self._engine.tokens.late_divisor = float(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.end(error)


def begin_minibatch(
    model: nn.Module,
    tokens: int | None = None,
    *,
    split: SplitPlan | None = None,
    plan: Planned | Callable[[], Planned] | None = None,
) -> minibatch:
    """Enters a minibatch where a `with` block can't be used; `end_minibatch(model)` leaves it.

    model, tokens, split, plan: as in `minibatch`.

    Returns the entered minibatch. Raises what entering `minibatch` raises.
    """
    return minibatch(model, tokens, split=split, plan=plan).__enter__()


def end_minibatch(model: nn.Module, error: BaseException | None = None) -> None:
    """Leaves the minibatch that `begin_minibatch` entered.

    model: that of `begin_minibatch`.
    error: what a microbatch raised, if anything.

    Raises what leaving `minibatch` raises.
    """
    protocol_of(model).end(error)


def _arguments(
    tokens: int | None, split: SplitPlan | None, plan: Planned | Callable[[], Planned] | None
) -> dict[str, Any]:
    """The participants', at the entry: an error is every rank's."""
    if plan is None:
        return {"tokens": tokens, "split": split}
    if split is not None:
        raise ValueError("split and plan are given: leave split out, which is the plan's")
    plan = plan() if callable(plan) else plan
    if not all(hasattr(plan, name) for name in ("rank", "tokens", "split", "plan")):
        whose = ", plan.packs(rank)" * hasattr(plan, "packs")
        raise TypeError(
            f"plan is a {type(plan).__name__}: give a rank's packs{whose}, as a sampler yields or pack_collate returns"
        )
    if tokens is None and plan.tokens is None:
        raise ValueError(
            "the plan does not know this rank's target tokens: give the packs that pack_collate returns (accelerate's "
            "loaders make plain lists of them), or the sampler's `targets`, or tokens=… with the plan"
        )
    return {"tokens": plan.tokens if tokens is None else tokens, "split": plan.split, "samples": plan}


class Participant:
    """Its hooks, in the order in which `Protocol` calls them:

        entry  (barrier)  entered  opened  (microbatches)  leave
        exit  (barrier)  settle  (reduction)  reduced

    and `failed` as soon as the minibatch fails on this rank. By default a hook does nothing. `name`: of its messages,
    and of the argument of `minibatch` that it takes, if any. Messages are JSON. A hook that gets the messages of all
    ranks raises on all of them or on none.
    """

    name: str
    needs_all_ranks = False  # in every minibatch, also of a model in which nothing that is sharded trains

    def entry(self, given: Any) -> Any:
        """Before the entry barrier; returns this rank's message. `given`: its argument of `minibatch`, None if there
        was none. Raises to keep all ranks out of the minibatch.
        """

    def entered(self, messages: list[Any]) -> None:
        """All ranks passed the entry barrier. Raises RanksDiffer, on all ranks, if they must not open the minibatch."""

    def opened(self) -> None:
        """The minibatch is open."""

    def leave(self) -> None:
        """This rank's microbatches are over. Raises to fail the minibatch, which fails it on all ranks."""

    def failed(self) -> None:
        """The minibatch failed on this rank: peers must not wait for it until the exit."""

    def exit(self) -> Any:
        """Before the exit barrier, when this rank's device is idle; returns this rank's message."""

    def settle(self, messages: list[Any] | None) -> None:
        """All ranks passed the exit barrier; None if the minibatch failed on one of them. Raises an OdcError,
        on all ranks, if the gradients can't be used.
        """

    def reduced(self) -> None:
        """`p.grad` is set."""

    # ---- checkpoints

    saved_as: str | None = None
    """The key of its state in a checkpoint, which begins with "odc_"; None if it has none."""

    def state(self) -> Any:
        """To be saved, as JSON: the same on all ranks."""

    def restore(self, state: Any) -> None:
        """Continues from a saved state, on all ranks."""


def checked_tokens(given: Any) -> int:
    """An integer of at least 0, from Python, numpy or a tensor of one element. Raises ValueError for others."""
    try:
        count = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"tokens is {given!r}; give this rank's number of target tokens, an int of at least 0")
    return count


class Tokens(Participant):
    """`total`: the target tokens of all ranks in the last minibatch that all entered; None if no rank gave its own.

    `divisor`: what gradients are divided by, unless the user chose a factor: losses are divided by the tokens already,
    else by the number of ranks, as FSDP2 does. `late_divisor`: by what instead, if it was given inside the minibatch.
    """

    name = "tokens"

    def __init__(self, world: int) -> None:
        self._world = world
        self.total: int | None = None
        self.late_divisor: float | None = None
        self._scope = contextlib.ExitStack()

    @property
    def divisor(self) -> int:
        return self._world if self.total is None else 1

    def entry(self, given: Any) -> int | None:
        return None if given is None else checked_tokens(given)

    def entered(self, messages: list[int | None]) -> None:
        counts = [count for count in messages if count is not None]
        if 0 < len(counts) < len(messages):
            missing = [rank for rank, count in enumerate(messages) if count is None]
            raise RanksDiffer(f"tokens was given on some ranks but not on ranks {missing}; give it on all or on none")
        self.total = sum(counts) if counts else None

    def opened(self) -> None:
        self.late_divisor = None
        if self.total is not None:
            self._scope.enter_context(_undivided())

    def leave(self) -> None:
        self._scope.close()

    def exit(self) -> float | None:
        return self.late_divisor

    def settle(self, messages: list[float | None] | None) -> None:
        if messages is not None and len(set(messages)) > 1:
            raise RanksDiffer(f"by rank, gradients were to be divided by {messages}: call divide_by alike on all ranks")


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Meanwhile `Accelerator.backward` does not divide the loss by `gradient_accumulation_steps`.

    A minibatch with tokens has any number of backwards, whose losses are divided by all ranks' tokens already.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if state is None:
        yield
        return
    options = state().plugin_kwargs  # as the setter of Accelerator.gradient_accumulation_steps does
    steps = options.get("num_steps", 1)
    options["num_steps"] = 1
    try:
        yield
    finally:
        options["num_steps"] = steps


class SameSamples(Participant):
    """Compares the samples that ranks have planned, and who computes which of them, where that is known."""

    name = "samples"

    def __init__(self, rank: int, world: int, *, is_alone: Callable[[], bool] = lambda: False) -> None:
        """`is_alone`: whether a plan must be for this rank alone."""
        self._rank, self._world, self._is_alone = rank, world, is_alone

    def entry(self, given: Planned | None) -> list[Any] | None:
        """[checksum of all ranks' samples, digest of all ranks' packs]."""
        if given is None or given.plan is None:
            return None
        rank, world = (0, 1) if self._is_alone() else (self._rank, self._world)
        if (rank if given.rank is None else given.rank, given.plan.ranks) != (rank, world):
            raise ValueError(
                f"the packs are those of rank {given.rank} of {given.plan.ranks}, and this is rank {rank} of {world}"
                f"{' inside of serving' * self._is_alone()}: give the sampler the model's rank and world"
            )
        return [given.plan.checksum, given.plan.digest]

    def entered(self, messages: list[list[Any] | None]) -> None:
        refuse_other_samples([each and each[0] for each in messages])
        known = [(rank, each[1]) for rank, each in enumerate(messages) if each]
        for rank, digest in known:
            if digest != known[0][1]:
                raise RanksDiffer(
                    f"rank {rank} assigns samples in another way than rank {known[0][0]}: give every rank's sampler "
                    f"the same balance, cost, extra, token_cap, split and replicas"
                )


def refuse_other_samples(checksums: Sequence[Any], name: str = "data set") -> None:
    """Raises RanksDiffer unless all ranks have the same samples; None where they are unknown."""
    known = [(rank, checksum) for rank, checksum in enumerate(checksums) if checksum is not None]
    for rank, checksum in known:
        if checksum != known[0][1]:
            raise RanksDiffer(
                f"rank {rank} has other samples than rank {known[0][0]}: give every rank the same {name} in the same "
                f"order, with the same seed, at the same position and not split by rank; each assigns all of them"
            )


class DividedAlike(Participant):
    """Compares the units' gradient divide factors, on this rank and between ranks."""

    name = "divide_factor"

    def __init__(self, units: Sequence[Any]) -> None:
        self._units = units

    def entry(self, given: None) -> float | None:
        factors = {unit.divide_factor for unit in self._units}
        if len(factors) > 1:
            raise ValueError(
                f"units have different gradient divide factors, {', '.join(sorted(map(str, factors)))}: call "
                f"set_gradient_divide_factor on the root, after fully_shard"
            )
        return next(iter(factors), None)

    def entered(self, messages: list[float | None]) -> None:
        if len(set(messages)) > 1:
            raise RanksDiffer(f"by rank, the gradient divide factors are {messages}: set the same on all ranks")


class Trained(Participant):
    """Compares which of the shards require a gradient: one bit each, in hexadecimal."""

    name = "trained"

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    def entry(self, given: None) -> str:
        bits = "".join(str(int(shard.sharded.requires_grad)) for shard in self._shards)
        return f"{int(bits or '0', 2):x}"

    def entered(self, messages: list[str]) -> None:
        if len(set(messages)) < 2:
            return
        masks = [f"{int(mask, 16):0{len(self._shards)}b}" for mask in messages]
        for shard, *bits in zip(self._shards, *masks, strict=True):
            if len(set(bits)) > 1:
                frozen = [rank for rank, bit in enumerate(bits) if bit == "0"]
                raise RanksDiffer(
                    f"{shard.name} is frozen on ranks {frozen} only, so its gradient would lack their part: "
                    f"call requires_grad_() with the same value on all ranks"
                )


class RefusesDeterminism(Participant):
    """Gradients are added in the order of their arrival: `torch.use_deterministic_algorithms(True)` is refused."""

    name = "order of arrival"

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def entry(self, given: None) -> None:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(self._refusal)
