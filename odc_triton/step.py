"""One step of training up to the optimizer's: `run_step`; and `evaluate`.

An `Objective` says what the loss is divided by, and computes it of one pack. This is the only place in the package
that trains inside a minibatch (doctor and tune try single layers), so what a step needs is here once: an entry with a
plan, repeats of exact sums, sums by name, one barrier after the reduction, in which `StepPart`s take part. Jobs call it
in jobs/train/run.py, trainers in jobs/trainers/sharded_trainer.py; there the optimizer steps.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .base.errors import MinibatchToRepeat, RanksDiffer
from .checkpoint.repeat import Replayable, repeating
from .engine.minibatch import SameSamples, checked_tokens, minibatch, protocol_of
from .engine.protocol import Protocol
from .packs.collate import count_target_tokens, to_device
from .plan.queue import QueuedPacks
from .sequence.enable import split_forward

Item = TypeVar("Item")
Made = TypeVar("Made")
Sums = Mapping[str, Tensor | float]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a loss is divided by.

    number: of all ranks' terms, at least 1; 1 where it is known last, and in an evaluation.
    samples: of all ranks in the minibatch, 0 if unknown.
    """

    number: int
    samples: int = 0


class Objective(ABC):
    """A loss that is a sum over packs, divided by how many terms they have on all ranks: target tokens, or pairs.

    Neither method may wait for other ranks, which may have any number of packs; but for `SampleSums`, whose packs are
    planned in waves.
    """

    def terms(self, model: nn.Module, packs: Any) -> int | Callable[[], float] | None:
        """How many terms this rank's `packs` have: by default their target tokens, None if these are unknown.

        `run_step` calls it at the minibatch's entry with its `model`, so its error is every rank's.

        A function if that is known only after the last pack: it then returns the divisor, above 0 and the same on all
        ranks. Gradients and the loss are divided by it, and `loss` must not divide.
        """
        if isinstance(packs, list) and all(isinstance(pack, Mapping) for pack in packs):
            return count_target_tokens(packs)
        return getattr(packs, "tokens", None)

    @abstractmethod
    def loss(self, model: nn.Module, pack: Any, terms: Terms) -> tuple[Tensor, Sums]:
        """The part of one pack in the loss, a scalar with a gradient, divided by `terms.number`; and numbers by name,
        which are added up over packs and ranks.

        model: in training mode, or in that of the evaluation.
        pack: on the model's device.
        terms: what to divide by. In an evaluation `terms.number` is 1: a loss with two divisors reports both parts as
            sums.
        """


class StepPart:
    """A feature's part in a step, and in its barrier."""

    def minibatch(self) -> None:
        """At the minibatch's entry, and when it is run again, as exact sums did not fit their scales."""

    def microbatch(self) -> None:
        """Before each pack of this rank. Raises to fail the minibatch, which fails it on all ranks."""

    def report(self) -> Any:
        """Returns this rank's report, as JSON. Gradients are reduced."""

    def settle(self, reports: list[Any]) -> None:
        """Takes all ranks' reports, by rank. Must decide the same on all of them."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Of all ranks, the same on each.

    loss: divided as gradients are, in an evaluation not at all.
    sums: by name, over packs.
    terms: their number; 0 if known last.
    repeats: how often the minibatch was run again.
    """

    loss: float
    sums: dict[str, float]
    terms: int
    repeats: int = 0


def run_step(
    model: nn.Module,
    plan: Any,
    objective: Objective,
    *,
    collate: Callable[[Any], Any] | None = None,
    ahead: bool = False,
    parts: Sequence[StepPart] = (),
) -> StepReport:
    """Forward and backward of this rank's packs of one minibatch, and a barrier: afterwards `p.grad` is this rank's
    shard of the gradient of the objective's loss over all ranks, and the optimizer may step. Zeros if nobody learned.

        for packs in sampler:
            collate = lambda pack: pack_collate([dataset[pack]])[0]
            report = run_step(model, packs, CrossEntropy(), collate=collate)
            optimizer.step()
            optimizer.zero_grad()

    The sampler knows `targets`, or the objective its terms.

    model: what `fully_shard` or `use_odc` returned.
    plan: what a MinibatchSampler yields or `pack_collate` makes of it, another iterable of packs, or a function that
        returns one, called at the entry, so that its error is every rank's.
    objective: the loss.
    collate: makes of a pack what `objective.loss` takes, on the host, by default nothing.
    ahead: collate in a thread, while the pack before it is computed (not of a queue, whose packs others could take).
    parts: of features in the step, in this order, the same on all ranks.

    Returns the report, the same on all ranks. Raises what a part raises, and as `minibatch`.
    """
    engine, repeats = protocol_of(model), 0
    planned = cache(plan if callable(plan) else lambda: plan)

    @cache
    def collated() -> Iterable[Any]:
        made = _collated(planned(), collate, ahead)
        return Replayable(made) if engine.deterministic else made  # which keeps them all

    def once() -> tuple[_Totals, float, int]:
        @cache
        def given() -> _Given:
            for part in parts:
                part.minibatch()
            return _Given(model, planned(), objective)

        totals, divisor = _Totals(), 1.0
        with minibatch(model, plan=given) as mb:
            terms = Terms(number=max(mb.tokens, 1), samples=given().samples)
            for pack in collated():
                for part in parts:
                    part.microbatch()
                loss, sums = objective.loss(model, _on_device(pack, engine), terms)
                loss.backward()
                totals.add(loss, sums)
            if (known_last := given().known_last) is not None:
                mb.divide_by(divisor := float(known_last()))
        return totals, divisor, mb.tokens

    def count(error: MinibatchToRepeat) -> None:
        nonlocal repeats
        repeats += 1

    totals, divisor, terms = repeating(once, count) if engine.deterministic else once()
    _learn_nothing(model.parameters())
    report = _exchanged(engine, f"sum up minibatch {engine.number}", totals.report(divisor), parts)
    return StepReport(**report, terms=terms, repeats=repeats)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    minibatches: Iterable[Any],
    objective: Objective,
    *,
    purpose: str = "evaluation",
    collate: Callable[[Any], Any] | None = None,
    ahead: bool = False,
    parts: Sequence[StepPart] = (),
) -> StepReport:
    """The objective's loss over minibatches, not divided, and its terms, of all ranks: no minibatch, one barrier, and
    another for each that holds segments of samples. The model's mode, `eval()`, is the caller's.

    minibatches: this rank's packs of each, planned alike on all ranks.
    purpose: of the barrier, for errors.
    model, objective, collate, ahead, parts: as in `run_step`; terms that are known last count as none.

    Raises RanksDiffer, after the last, for packs of other plans.
    """
    engine, totals, count, plans = protocol_of(model), _Totals(), 0, []
    same = SameSamples(engine.rank, engine.world, is_alone=lambda: engine.is_alone)
    for part in parts:
        part.minibatch()
    for packs in minibatches:
        if isinstance(packs, Mapping):
            raise TypeError("minibatches has a pack: give of each minibatch the list of this rank's packs")
        given = _Given(model, packs, objective)
        count += given.tokens or 0
        plans.append(same.entry(given))
        with contextlib.nullcontext() if given.split is None else split_forward(model, given.split):
            for pack in _collated(packs, collate, ahead):
                for part in parts:
                    part.microbatch()
                totals.add(*objective.loss(model, _on_device(pack, engine), Terms(number=1, samples=given.samples)))
    own = totals.report(1.0) | {"terms": count}
    return StepReport(**_exchanged(engine, purpose, own, parts, plans))


class _Given:
    """What `minibatch` reads of a plan; its tokens are the objective's terms."""

    rank: int | None
    tokens: int | None

    def __init__(self, model: nn.Module, packs: Any, objective: Objective) -> None:
        self.rank, self.plan = getattr(packs, "rank", None), getattr(packs, "plan", None)
        self.split = None if self.plan is None else self.plan.split
        self.samples: int = getattr(packs, "samples", 0)
        terms = objective.terms(model, packs)
        if terms is None:
            raise ValueError(
                "the packs' target tokens are not known: give the MinibatchSampler `targets`, or collated packs"
            )
        self.known_last = terms if callable(terms) else None
        self.tokens = 0 if callable(terms) else checked_tokens(terms)


class _Totals:
    """This rank's sums over packs, in float64, on the device until `report`."""

    def __init__(self) -> None:
        self._loss: Tensor | float = 0.0
        self._sums: dict[str, Tensor | float] = {}

    def add(self, loss: Tensor, sums: Sums) -> None:
        self._loss = self._loss + _in_fp64("the loss", loss)
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + _in_fp64(f"the sum {name!r}", value)

    def report(self, divisor: float) -> dict[str, Any]:
        values = [self._loss, *self._sums.values()]
        device = next((value.device for value in values if isinstance(value, Tensor)), None)
        loss, *sums = torch.stack(
            [torch.as_tensor(each, dtype=torch.float64, device=device) for each in values]
        ).tolist()
        return {"loss": loss / divisor, "sums": dict(zip(self._sums, sums, strict=True))}


def _in_fp64(what: str, value: Tensor | float) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{what} of a pack has shape {list(value.shape)}: give one number")
        return value.detach().double().reshape(())
    return value


def _exchanged(
    engine: Protocol,
    purpose: str,
    own: dict[str, Any],
    parts: Sequence[StepPart],
    plans: Sequence[Any] = (),
) -> dict[str, Any]:
    """The step's barrier: `own` numbers, added up over ranks; and the parts' reports. `plans`: as SameSamples has them,
    which must be those of all ranks.
    """
    message = own | {"parts": [part.report() for part in parts], "plans": plans}
    messages = [message] if engine.is_alone else engine.exchange(purpose, message)
    for what in ("parts", "plans"):
        if len(counts := {len(theirs[what]) for theirs in messages}) > 1:
            raise RanksDiffer(f"{purpose}: by rank there are {sorted(counts)} {what}: give the same on all ranks")
    for of_minibatch in zip(*(theirs["plans"] for theirs in messages), strict=True):
        SameSamples(engine.rank, engine.world).entered([*of_minibatch])
    for part, *reports in zip(parts, *(theirs["parts"] for theirs in messages), strict=True):
        part.settle(reports)
    names = dict.fromkeys(name for theirs in messages for name in theirs["sums"])  # a rank without packs has none
    sums = {name: sum(theirs["sums"].get(name, 0.0) for theirs in messages) for name in names}
    return {name: sum(theirs[name] for theirs in messages) for name in own if name != "sums"} | {"sums": sums}


def _learn_nothing(parameters: Iterable[nn.Parameter]) -> None:
    """If no parameter has a gradient, as no token was learned, all get zeros: the step decays, and momenta go on."""
    trained = [each for each in parameters if each.requires_grad]
    if all(each.grad is None for each in trained):
        for each in trained:
            each.grad = torch.zeros_like(each)


def _on_device(pack: Any, engine: Protocol) -> Any:
    return to_device(pack, engine.heap.device) if isinstance(pack, Mapping) else pack


def _collated(packs: Any, collate: Callable[[Any], Any] | None, ahead: bool) -> Iterable[Any]:
    """During iteration: a queue's packs are taken then."""
    if collate is None:
        return packs
    return one_ahead(collate, packs) if ahead and not isinstance(packs, QueuedPacks) else map(collate, packs)


def one_ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """`make` of each item, in order. While one is used, a thread makes the next: reading and resizing an image takes
    about as long as its step in the vision tower.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        upcoming: Future[Made] | None = None
        for item in items:
            former, upcoming = upcoming, thread.submit(make, item)
            if former is not None:
                yield former.result()
        if upcoming is not None:
            yield upcoming.result()
