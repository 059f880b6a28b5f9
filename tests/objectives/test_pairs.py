"""DPO and reward models on real ranks, against their formulas on unsplit samples and a whole model, in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odc_triton import fully_shard
from odc_triton.balance import CostModel, Limits, Samples, find_relatives, make_plan
from odc_triton.hf import enable_packing
from odc_triton.objectives import DPO, ORPO, BradleyTerry, SampleSums, evaluate, run_step
from odc_triton.packs.reference import Reference
from odc_triton.plan.fields import IGNORED
from tests.objectives.test_orpo import CASES, LENGTHS, SAMPLES, model_of, planned
from tests.support import ranks, slow
from tests.support.families import causal_lm
from tests.support.versions import since

CHOSEN = ("one pack", "chosen ones branch from a rejected one", "two ranks", "pairs over ranks", "all in segments")
BETA, CENTER, TOLERANCE = 0.7, 0.1, 1e-10  # of norms: sums in another order, in fp64
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of log-ratios [N, 2] and tokens [N, 2], as in TRL
    "sigmoid": lambda ratio, tokens: -F.logsigmoid(BETA * (ratio[:, 0] - ratio[:, 1])),
    "hinge": lambda ratio, tokens: torch.relu(1 - BETA * (ratio[:, 0] - ratio[:, 1])),
    "ipo": lambda ratio, tokens: ((ratio / tokens).diff(dim=1)[:, 0].neg() - 1 / (2 * BETA)) ** 2,
}
FP64 = since("5.23", "StableLm's rope takes no fp64")


def _frozen(backend: str | None) -> nn.Module:
    """The reference: another model."""
    model = model_of(backend).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


def _logps(model: nn.Module, pairs: tuple[int, ...]) -> Tensor:
    """[N, 2], of whole completions."""
    found = []
    for sample in (SAMPLES[2 * pair + side] for pair in pairs for side in (0, 1)):
        ids, labels = (torch.tensor([[*sample[name]]]) for name in ("input_ids", "labels"))
        logp = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(logp[labels[0, 1:] != IGNORED].sum())
    return torch.stack(found).view(-1, 2)


@functools.cache
def _by_torch(pairs: tuple[int, ...], kind: str) -> dict[str, Any]:
    model = model_of(None)
    with torch.no_grad():
        reference = _logps(_frozen(None), pairs)
    ratio = _logps(model, pairs) - reference
    learned = [
        [sum(label != IGNORED for label in SAMPLES[2 * pair + side]["labels"][1:]) for side in (0, 1)] for pair in pairs
    ]
    loss = LOSSES[kind](ratio, torch.tensor(learned)).mean()
    loss.backward()
    return _found(loss, BETA * ratio, model)


def _found(loss: Tensor, rewards: Tensor, model: nn.Module) -> dict[str, Any]:
    """`rewards`: [N, 2]."""
    chosen, rejected = rewards.detach().unbind(1)
    return {
        "loss": loss.detach(),
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
        "rewards/margins": (chosen - rejected).mean(),
        **{name: parameter.grad for name, parameter in model.named_parameters()},
    }


def _largest_error(got: dict[str, Any], want: dict[str, Any]) -> float:
    assert want.keys() == got.keys()
    pairs = [[torch.as_tensor(each[name], dtype=torch.float64) for each in (got, want)] for name in want]
    return max(float((ours - theirs).norm() / (theirs.norm() or 1)) for ours, theirs in pairs)


def _of_dpo(rank: int, world: int, backend: str) -> dict[tuple[str, str], float]:
    found, model, frozen = {}, model_of(backend), _frozen(backend)
    sums, reference = SampleSums(model, samples=len(SAMPLES)), Reference(frozen, model)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # of rope
        for case in (each for each in CHOSEN if CASES[each][0] == world):
            for kind in LOSSES:
                dpo = DPO(samples=SAMPLES, sums=sums, reference=reference, beta=BETA, kind=kind)  # pyright: ignore
                packs = planned(case).packs(rank)
                report = run_step(model, packs, dpo, collate=dpo.collate)
                got = dpo.means(report.sums)
                assert got["loss"] == pytest.approx(report.loss, rel=1e-12)
                got |= {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
                found[case, kind] = _largest_error(got, _by_torch(CASES[case][1], kind))
                model.zero_grad()
    return found


@FP64
@pytest.mark.parametrize(("world", "backend"), [(1, "cpu"), (2, "cpu"), slow(2, "cpu-sharded")])
def test_dpo(world: int, backend: str) -> None:
    for found in ranks.run(_of_dpo, world, backend):
        assert len(found) == 3 * sum(CASES[case][0] == world for case in CHOSEN)
        assert max(found.values()) <= TOLERANCE, found


def _classifier() -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    config = causal_lm("StableLm", attention="sdpa").config  # whose norms are computed in fp64
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa").double()


def _of_reward(rank: int, world: int) -> float:
    """A step and an evaluation of all samples, with one token more, shared prefixes, a rank without the last pair."""
    texts = [torch.tensor([*sample["input_ids"]]) for sample in SAMPLES]
    rows = [F.pad(text, (0, 1), value=7) for text in texts]
    scored = [row.masked_fill(torch.arange(len(row)) < len(row) - 1, IGNORED) for row in rows]
    samples = [{"input_ids": row, "labels": labels} for row, labels in zip(rows, scored, strict=True)]
    cost, names = CostModel(quadratic=0.01, linear=1.0), [*range(len(rows))]
    columns: dict[str, Any] = {"groups": [name // 2 for name in names], "prefixes": find_relatives(samples)}
    plan = make_plan(Samples.of([each + 1 for each in LENGTHS], cost, **columns), Limits(ranks=world, token_cap=200))
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        enable_packing(model := _classifier())
        model = fully_shard(model)
        objective = BradleyTerry(samples=samples, center=CENTER)
        report = run_step(model, plan.packs(rank), objective, collate=objective.collate)
        got: dict[str, Any] = objective.means(report.sums)
        evaluated = objective.means(evaluate(model, [plan.packs(rank)], objective, collate=objective.collate).sums)
        assert evaluated == pytest.approx(got, rel=1e-9)
        got |= {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        plain = _classifier()
        scores = torch.stack([plain(text[None]).logits[0, 0] for text in texts]).view(-1, 2)
        chosen, rejected = scores.unbind(1)
        loss = (-F.logsigmoid(chosen - rejected) + CENTER * (chosen + rejected) ** 2).mean()
        loss.backward()
    return _largest_error(got, _found(loss, scores, plain))


@FP64
@pytest.mark.parametrize("world", [1, 2])
def test_reward(world: int) -> None:
    assert max(ranks.run(_of_reward, world)) <= TOLERANCE


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: DPO(samples=[], reference=Tensor, kind="sigmoyd"),
            "kind is 'sigmoyd', beta 0.1: give one of sigmoid,",
        ),
        (lambda: DPO(samples=[], reference=Tensor, beta=0), "beta 0: give .* a number above 0"),
        (lambda: DPO(samples=[], reference=Tensor, beta=float("nan")), "beta nan: give"),
        (lambda: ORPO(samples=[], beta=-0.1), "beta is -0.1: give a number of at least 0"),
        (lambda: ORPO(samples=[{}]), "pair 0 has only sample 0"),
    ],
)
def test_options_are_refused_before_a_step(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
