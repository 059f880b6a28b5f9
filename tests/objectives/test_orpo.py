"""ORPO on real ranks, against TRL's own ORPOTrainer on one padded batch of all pairs and a whole model, in fp64."""

from __future__ import annotations

import os
import re
import signal
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from odc_triton import enable_split, fully_shard
from odc_triton.balance import CostModel, find_relatives
from odc_triton.hf import enable_packing
from odc_triton.objectives import ORPO, evaluate, run_step
from odc_triton.plan.plan import Plan
from odc_triton.plan.planner import make_plan
from odc_triton.plan.samples import Limits, Samples
from odc_triton.sequence.sums import SampleSums
from tests.support import ranks, slow
from tests.support.families import causal_lm
from tests.support.refusals import caught

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")

# Of each pair the tokens of its prompt, of the chosen and of the rejected completion; pairs 0 and 1 have one prompt.
PAIRS = ((40, 9, 5), (40, 1, 12), (3, 20, 17), (36, 6, 1), (1, 30, 8))
ALL, BETA, TOLERANCE = (0, 1, 2, 3, 4), 0.7, 1e-10  # of norms: sums in another order, in fp64
IN_FP64 = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)  # TRL's loss and our log_probs cast to fp32
# By case: ranks, pairs, tokens of a pack, whether prompts are shared, tokens that others may read; and of the plan how
# many tokens are computed, how many packs there are, and which pairs several ranks compute.
CASES: dict[str, tuple[int, tuple[int, ...], int, bool, int, tuple[int, int, set[int]]]] = {
    "one pack": (1, ALL, 500, False, 0, (349, 1, set())),
    "chosen ones branch off a rejected one": (1, ALL, 500, True, 0, (197, 1, set())),
    "two packs": (1, ALL, 150, True, 0, (197, 2, set())),
    "two ranks": (2, ALL, 150, True, 0, (197, 2, set())),
    "no pack on one rank": (2, (2,), 150, False, 0, (43, 1, set())),
    "pairs over ranks": (2, ALL, 60, False, 200, (349, 8, {0, 1, 3})),
    "a prompt's part on one rank": (2, (0,), 50, True, 100, (55, 2, {0})),
    "all in pieces": (2, ALL, 30, True, 200, (236, 10, {*ALL})),
}


def samples() -> list[dict[str, Tensor]]:
    draw, made = torch.Generator().manual_seed(0), []
    for number, (prompt, *completions) in enumerate(PAIRS):
        before = torch.arange(3, 43) if number < 2 else torch.randint(3, 97, (prompt,), generator=draw)
        for length in completions:
            ids = torch.cat([before, torch.randint(3, 97, (length,), generator=draw)])
            made.append({"input_ids": ids, "labels": ids.where(torch.arange(len(ids)) >= prompt, -100)})
    return made


def planned(case: str, *, grouped: bool = True) -> Plan:
    world, pairs, cap, shares, tokens, _ = CASES[case]
    names = [sample for pair in pairs for sample in (2 * pair, 2 * pair + 1)]
    own = [samples()[name] for name in names]
    given = Samples.of(
        [len(each["input_ids"]) for each in own],
        CostModel(quadratic=0.01, linear=1.0, microbatch=2.0),
        names=names,
        groups=[name // 2 for name in names] if grouped else None,
        prefixes=find_relatives(own) if shares else None,
    )
    with mock.patch("odc_triton.plan.shared.LEAST_TOKENS", 2):
        return make_plan(given, Limits(ranks=world, token_cap=cap, split_tokens=tokens))


def whole(family: str) -> nn.Module:
    torch.manual_seed(0)
    return causal_lm(family, attention="sdpa").double()


def by_trl(family: str, pairs: tuple[int, ...]) -> tuple[dict[str, float], dict[str, Tensor]]:
    from trl.experimental.orpo import ORPOTrainer
    from trl.experimental.utils import DPODataCollatorWithPadding

    def row(pair: int) -> dict[str, Any]:
        sides = zip(("chosen", "rejected"), samples()[2 * pair : 2 * pair + 2], strict=True)
        masked = ((side, {**each, "attention_mask": torch.ones_like(each["labels"])}) for side, each in sides)
        return {f"{side}_{name}": ids.tolist() for side, each in masked for name, ids in each.items()}

    trainer, model = object.__new__(ORPOTrainer), whole(family)
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda each: each)
    vars(trainer).update(beta=BETA, is_encoder_decoder=False, aux_loss_enabled=False, padding_value=0)
    vars(trainer).update(accelerator=accelerator)
    batch = DPODataCollatorWithPadding(pad_token_id=0)([row(pair) for pair in pairs])
    loss, metrics = trainer.get_batch_loss_metrics(model, batch)
    loss.backward()
    return {"loss": loss.item(), **metrics}, {name: p.grad for name, p in model.named_parameters()}


def sharded(family: str, **how: Any) -> tuple[nn.Module, SampleSums]:
    enable_packing(model := whole(family))
    model = fully_shard(model, **how)
    enable_split(model, tokens=200)
    return model, SampleSums(model, samples=2 * len(PAIRS))


def _errors(rank: int, world: int, family: str, how: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By case and name the relative error of a number, or gradient; of a step and an evaluation."""
    model, sums = sharded(family, **how)
    orpo, found = ORPO(samples=samples(), beta=BETA, sums=sums), {}
    for case in [name for name, (of, *_) in CASES.items() if of == world]:
        with IN_FP64:
            want, gradients = by_trl(family, CASES[case][1])
            report = run_step(model, packs := planned(case).packs(rank), orpo, collate=orpo.collate)
            measured = orpo.means(evaluate(model, [packs], orpo, collate=orpo.collate).sums)
        assert report.terms == report.sums["nll_tokens"]
        assert report.sums["pairs"] == len(CASES[case][1])
        assert {"loss": report.loss} | orpo.means(report.sums) == pytest.approx(measured, rel=TOLERANCE)
        assert measured.keys() == {name for name in want if not name.startswith("logits/")}
        of_case = found[case] = {name: abs(value - want[name]) / (abs(want[name]) or 1) for name, value in measured.items()}
        for name, parameter in model.named_parameters():
            error = parameter.grad.full_tensor() - gradients[name]
            of_case[name] = float(error.norm() / gradients[name].norm())
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("world", "family", "how"),
    [(1, "StableLm", {}), (2, "StableLm", {}), slow(2, "GPT2", {"backend": "cpu-sharded"})],
)
def test_as_trl(world: int, family: str, how: dict[str, Any]) -> None:
    for found in ranks.run(_errors, world, family, how):
        assert len(found) >= 3
        for case, errors in found.items():
            assert max(errors.values()) <= TOLERANCE, (case, errors)
