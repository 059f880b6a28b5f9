"""`run_step` and `evaluate` on ranks with different numbers of packs, against plain torch on all packs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from odc_triton import fully_shard
from odc_triton.balance import Plan, Segment, pack_collate
from odc_triton.hf import summed_loss
from odc_triton.objectives.cross_entropy import CrossEntropy
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.step import Objective, StepPart, StepReport, Sums, Terms, evaluate, run_step
from tests.support import ranks
from tests.support.refusals import caught
from tests.support.splitting import Setup, build, packs_of, samples, sharded

# By number of ranks, each rank's packs: rows of a model of four inputs. The first of three ranks has none.
PACKS = {1: [[1.0, 2.0, 3.0, 5.0]], 2: [[1.0, 2.0, 5.0], [3.0]], 3: [[], [5.0], [1.0, 2.0, 3.0]]}
TERMS = 11


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


@dataclass(frozen=True)
class Squares(Objective):
    """sum over packs of model(x)^2 / TERMS; `late`: TERMS are known last."""

    late: bool = False
    of_rank: int = TERMS

    def terms(self, model: nn.Module, packs: Any) -> int | Callable[[], float]:
        return (lambda: float(TERMS)) if self.late else self.of_rank

    def loss(self, model: nn.Module, pack: float, terms: Terms) -> tuple[Tensor, Sums]:
        summed = model(torch.full((1, 4), pack)).square().sum()
        sums = {"packs": 1, "squares": summed, **({"five": pack} if pack == 5 else {})}
        return (summed if self.late else summed / terms.number), sums


class Noted(StepPart):
    """Reports its rank; notes what it was asked."""

    name = "noted"

    def __init__(self, rank: int, fails: bool = False) -> None:
        self.rank, self.fails, self.calls = rank, fails, []

    def minibatch(self) -> None:
        self.calls.append("minibatch")

    def microbatch(self) -> None:
        self.calls.append("microbatch")
        if self.fails:
            raise KeyError("stop here")

    def report(self) -> int:
        self.calls.append("report")
        return self.rank

    def settle(self, reports: list[int]) -> None:
        self.calls.append(f"settle {reports}")


def plain() -> tuple[dict[str, Tensor], float, dict[str, float]]:
    model, found = net(), []
    for pack in PACKS[1][0]:
        loss, sums = Squares().loss(model, pack, Terms(number=TERMS))
        loss.backward()
        found.append((loss.item(), sums["squares"].item()))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, sum(loss for loss, _ in found), {"packs": 4, "squares": sum(each for _, each in found), "five": 5}


def _steps(rank: int, world: int) -> list[tuple[dict[str, Tensor], StepReport, list[str]]]:
    found = []
    of_rank = np.int64(TERMS) if rank == world - 1 else 0
    for objective in (Squares(of_rank=of_rank), Squares(late=True)):
        model, part = fully_shard(net()), Noted(rank)
        made = (pack + 1 for pack in PACKS[world][rank])  # taken once

        def planned(made: Iterator[float] = made) -> Iterator[float]:
            return made

        report = run_step(model, planned, objective, collate=lambda pack: pack - 1, ahead=objective.late, parts=[part])
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        found.append((gradients, report, part.calls))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_step_is_that_of_plain_torch_on_all_packs(world: int) -> None:
    gradients, loss, sums = plain()
    for rank, of_rank in enumerate(ranks.run(_steps, world)):
        for (found, report, calls), terms in zip(of_rank, (TERMS, 0), strict=True):
            assert found.keys() == gradients.keys()
            for name, want in gradients.items():
                torch.testing.assert_close(found[name], want, msg=name)  # the order of fp32 sums differs
            assert report == StepReport(loss=pytest.approx(loss), sums=pytest.approx(sums), terms=terms)
            assert calls == [
                "minibatch",
                *["microbatch"] * len(PACKS[world][rank]),
                "report",
                f"settle {[*range(world)]}",
            ]


def _exact(rank: int, world: int) -> list[Any]:
    model, part, optimizer_steps = fully_shard(net(), exact=True), Noted(rank), []
    for factor in (1.0, 1e4):
        part.calls.clear()
        packs = iter(PACKS[world][rank])  # which can't be iterated twice
        report = run_step(model, packs, Squares(), collate=lambda pack, by=factor: by * pack, parts=[part])
        optimizer_steps.append((report, part.calls.count("minibatch"), part.calls.count("report")))
        model.zero_grad()
    return optimizer_steps


def test_a_minibatch_that_is_repeated_has_the_same_packs_and_counts_once() -> None:
    for (first, *_), (report, begun, reported) in ranks.run(_exact, 2):
        assert first.sums["squares"] > 0
        assert (report.repeats, begun, reported) == (1, 2, 1), "ten thousand times as large sums don't fit"
        assert report.sums["packs"] == 4
        assert report.sums["squares"] == pytest.approx(report.loss * 2 * TERMS)


def _untouched(rank: int, world: int) -> list[bool]:
    whole = net()
    whole.unused = nn.Linear(4, 2)
    whole.forward = lambda x: whole[1](whole[0](x))
    model = fully_shard(whole)
    run_step(model, [1.0] * rank, Squares())
    return [parameter.grad is None for name, parameter in model.named_parameters() if "unused" in name]


def test_a_parameter_that_others_do_without_has_no_gradient() -> None:
    """Zeros would decay it, where plain torch leaves it as it is."""
    assert ranks.run(_untouched, 2) == [[True, True]] * 2


class Wrong(Squares):
    def terms(self, model: nn.Module, packs: Any) -> Any:
        if packs is None:
            raise OSError("data is gone")
        return (lambda: 0.0) if packs == ["late"] else None


class TwoSums(Squares):
    def loss(self, model: nn.Module, pack: float, terms: Terms) -> tuple[Tensor, Sums]:
        return super().loss(model, pack, terms)[0], {"two": torch.ones(2)}


class Early(Noted):
    def __init__(self) -> None:
        super().__init__(1)

    def minibatch(self) -> None:
        raise KeyError("early")


def other_plan(rank: int) -> MinibatchPacks:
    plan = Plan.by_hand([[[0]], [[1]]] if rank else [[[1]], [[0]]])
    return MinibatchPacks(plan=plan, rank=rank)


# What rank 1 does, and what rank 0 and rank 1 hear.
FAILURES: dict[str, tuple[Callable[[nn.Module, int], Any], str, str]] = {
    "an error of the plan": (
        lambda model, rank: run_step(model, lambda: 1 // (1 - rank) and [], Squares()),
        "rank 1.*ZeroDivisionError",
        "ZeroDivisionError",
    ),
    "an error of the terms": (
        lambda model, rank: run_step(model, None if rank else [], Wrong() if rank else Squares()),
        "rank 1.*OSError: data is gone",
        "OSError: data is gone",
    ),
    "a part": (
        lambda model, rank: run_step(model, [1.0], Squares(), parts=[Noted(rank, fails=rank == 1)]),
        "rank 1.*KeyError: 'stop here'",
        "KeyError: 'stop here'",
    ),
    "a part at the entry": (
        lambda model, rank: run_step(model, [1.0], Squares(), parts=[Early() if rank else Noted(rank)]),
        "rank 1.*KeyError: 'early'",
        "KeyError: 'early'",
    ),
    "parts that differ": (
        lambda model, rank: run_step(model, [1.0], Squares(), parts=[Noted(rank)] * rank),
        r"RanksDiffer: sum up minibatch \d: by rank there are \[0, 1\] parts: give the same on all ranks",
        r"RanksDiffer: sum up minibatch \d: by rank there are \[0, 1\] parts: give the same on all ranks",
    ),
    "a sum of two": (
        lambda model, rank: run_step(model, [1.0], TwoSums()),
        r"ValueError: the sum 'two' of a pack has shape \[2\]: give one number",
        r"ValueError: the sum 'two' of a pack has shape \[2\]: give one number",
    ),
    "a divisor of 0": (
        lambda model, rank: run_step(model, ["late"], Wrong(), collate=lambda _: 1.0),
        "ValueError: divide_by has 0.0; give a finite number above 0",
        "ValueError: divide_by has 0.0; give a finite number above 0",
    ),
    "unknown terms": (
        lambda model, rank: run_step(model, MinibatchPacks([[0]]), Wrong()),
        "ValueError: the packs' target tokens are not known: give the MinibatchSampler `targets`, or collated packs",
        "ValueError: the packs' target tokens are not known: give the MinibatchSampler `targets`, or collated packs",
    ),
    "unknown terms of an evaluation": (
        lambda model, rank: evaluate(model, [MinibatchPacks([[0]])], Wrong()),
        "ValueError: the packs' target tokens are not known",
        "ValueError: the packs' target tokens are not known",
    ),
    "terms below 0 of an evaluation": (
        lambda model, rank: evaluate(model, [[]], Squares(of_rank=-1)),
        "ValueError: tokens is -1; give this rank's number of target tokens",
        "ValueError: tokens is -1; give this rank's number of target tokens",
    ),
    "one pack for a minibatch": (
        lambda model, rank: evaluate(model, [{"input_ids": 1}], Squares()),
        "TypeError: minibatches has a pack: give of each minibatch the list",
        "TypeError: minibatches has a pack: give of each minibatch the list",
    ),
    "an evaluation of other plans": (
        lambda model, rank: evaluate(model, [other_plan(rank)], Squares(of_rank=0)),
        "RanksDiffer: rank 1 assigns samples in another way than rank 0",
        "RanksDiffer: rank 1 assigns samples in another way than rank 0",
    ),
    "more minibatches to evaluate": (
        lambda model, rank: evaluate(model, [[]] * (1 + rank), Squares(of_rank=0)),
        r"RanksDiffer: evaluation: by rank there are \[1, 2\] plans",
        r"RanksDiffer: evaluation: by rank there are \[1, 2\] plans",
    ),
}


def _failures(rank: int, world: int) -> dict[str, list[str]]:
    model, found = fully_shard(net()), {}
    for name, (step, *_) in FAILURES.items():
        found[name] = [caught(lambda step=step: step(model, rank))]
    report = run_step(model, [], Squares())  # after all of these it still works; nobody has a pack
    assert report == StepReport(loss=0.0, sums={}, terms=2 * TERMS)
    assert all(bool((parameter.grad.to_local() == 0).all()) for parameter in model.parameters())
    return found


def test_errors_are_every_ranks() -> None:
    for rank, found in enumerate(ranks.run(_failures, 2)):
        for name, (_, *words) in FAILURES.items():
            assert re.search(words[rank], found[name][0]), (rank, name, found[name])


def _evaluations(rank: int, world: int) -> list[StepReport]:
    model, part = fully_shard(net()), Noted(rank)
    minibatches = [PACKS[world][rank], []]
    report = evaluate(model, minibatches, Squares(of_rank=np.int64(2 * rank)), collate=lambda pack: pack, parts=[part])
    assert part.calls == ["minibatch", *["microbatch"] * len(minibatches[0]), "report", f"settle {[*range(world)]}"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model._odc_engine.number == -1, "no minibatch was opened"
    return [report]


@pytest.mark.parametrize("world", [1, 3])
def test_an_evaluation_divides_nothing(world: int) -> None:
    _, loss, sums = plain()
    terms = 2 * sum(2 * rank for rank in range(world))  # of two minibatches
    for (report,) in ranks.run(_evaluations, world):
        assert report == StepReport(loss=pytest.approx(loss * TERMS), sums=pytest.approx(sums), terms=terms)


def _in_segments(rank: int, world: int) -> StepReport:
    """The third rank has nothing of the samples in segments, the first nothing of the whole ones."""
    setup = Setup()
    deals = ([[[Segment(0, 0, 24)]], [[Segment(0, 24, 41)]], []], [[], [[1], [2]], [[3]]])
    minibatches = [packs_of(setup, rank, deal=deal) for deal in deals]
    model = sharded(setup, rank).eval()
    return evaluate(model, minibatches, CrossEntropy())


def test_segments_of_samples_are_evaluated() -> None:
    setup = Setup()
    packs = pack_collate([samples(setup)])
    with torch.no_grad():
        want = summed_loss(build(setup, replaced=False).eval(), packs[0]).item()
    for report in ranks.run(_in_segments, 3):
        assert report.terms == sum(len(sample["input_ids"]) - 1 for sample in samples(setup))
        assert report.loss == report.sums["token_loss"] == pytest.approx(want, rel=1e-5)  # fp32 in other orders


def test_terms_are_target_tokens_by_default() -> None:
    class Tokens(Squares):
        terms = Objective.terms

    collated = [{"labels": torch.tensor([[-100, 3, 4]])}, {"labels": torch.tensor([[-100, 3]])}]
    for packs, want in [
        (MinibatchPacks([[0], [1]], tokens=7), 7),
        (collated, 3),
        (MinibatchPacks(collated), 3),
        ([[0], [1]], None),
        ([], 0),
    ]:
        assert Tokens().terms(net(), packs) == want
