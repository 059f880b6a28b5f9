"""ORPO on real ranks, against TRL's own ORPOTrainer on one padded batch of all pairs and a whole model, in fp64."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from odc_triton import enable_split, fully_shard
from odc_triton.balance import CostModel, Plan, find_relatives
from odc_triton.hf import enable_packing
from odc_triton.objectives import ORPO, evaluate, run_step
from odc_triton.plan.entries import number_of
from odc_triton.plan.line import count_tokens
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
# Ranks, pairs, tokens of a pack, whether prompts are shared, tokens that others may read; and of the plan how
# many tokens are computed, in how many packs, and which pairs several ranks compute.
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


def planned(case: str, grouped: bool = True) -> Plan:
    world, pairs, cap, shares, tokens, _ = CASES[case]
    names = [sample for pair in pairs for sample in (2 * pair, 2 * pair + 1)]
    columns = {"names": names, "groups": [name // 2 for name in names] if grouped else None}
    own = [samples()[name] for name in names]
    columns["prefixes"] = find_relatives(own) if shares else None
    given = Samples.of([len(each["input_ids"]) for each in own], CostModel(quadratic=0.01, linear=1.0), **columns)
    with mock.patch("odc_triton.plan.shared.LEAST_TOKENS", 2):  # of a piece
        return make_plan(given, Limits(ranks=world, token_cap=cap, split_tokens=tokens))


def by_trl(model: nn.Module, pairs: tuple[int, ...]) -> tuple[dict[str, float], dict[str, Tensor]]:
    from trl.experimental.orpo import ORPOTrainer
    from trl.experimental.utils import DPODataCollatorWithPadding

    def row(pair: int) -> dict[str, list[int]]:
        sides = zip(("chosen", "rejected"), samples()[2 * pair : 2 * pair + 2], strict=True)
        masked = ((side, {**each, "attention_mask": torch.ones_like(each["labels"])}) for side, each in sides)
        return {f"{side}_{name}": ids.tolist() for side, each in masked for name, ids in each.items()}

    trainer = object.__new__(ORPOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda each: each)
    vars(trainer).update(beta=BETA, is_encoder_decoder=False, aux_loss_enabled=False, padding_value=0)
    loss, metrics = trainer.get_batch_loss_metrics(model, DPODataCollatorWithPadding(0)([*map(row, pairs)]))
    loss.backward()
    return {"loss": loss.item(), **metrics}, {name: p.grad for name, p in model.named_parameters()}


def whole(family: str) -> nn.Module:
    torch.manual_seed(0)
    return causal_lm(family, attention="sdpa").double()


def sharded(family: str, backend: str = "cpu") -> tuple[nn.Module, SampleSums]:
    enable_packing(model := whole(family))
    enable_split(model := fully_shard(model, backend=backend), tokens=200)
    return model, SampleSums(model, samples=2 * len(PAIRS))


def relative(got: Any, want: Any) -> float:
    return float(abs(got - want) / (abs(want) or 1) if isinstance(want, float) else (got - want).norm() / want.norm())


def _errors(rank: int, world: int, family: str, backend: str) -> dict[str, dict[str, float]]:
    """By case and name relative errors, of a step's gradients and an evaluation's numbers, which are the step's."""
    (model, sums), found, lengths = sharded(family, backend), {}, [len(each["input_ids"]) for each in samples()]
    orpo = ORPO(samples=samples(), beta=BETA, sums=sums)
    for case in [name for name, (of, *_) in CASES.items() if of == world]:
        plan, pairs = planned(case), CASES[case][1]
        packs = [(at, pack) for at, own in enumerate(plan.ready) for pack in own]
        homes = {(number_of(entry) // 2, at) for at, pack in packs for entry in pack}
        over = {pair for pair in pairs if len({at for of, at in homes if of == pair}) > 1}
        assert (sum(count_tokens(pack, lengths) for _, pack in packs), len(packs), over) == CASES[case][-1]
        # TRL's loss and our log_probs are in fp32 else.
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            want, gradients = by_trl(whole(family), pairs)
            report = run_step(model, plan.packs(rank), orpo, collate=orpo.collate)
            measured = orpo.means(evaluate(model, [plan.packs(rank)], orpo, collate=orpo.collate).sums)
        assert (report.terms, len(pairs)) == pytest.approx((report.sums["nll_tokens"], report.sums["pairs"]))
        assert {"loss": report.loss} | orpo.means(report.sums) == pytest.approx(measured, rel=TOLERANCE)
        assert measured.keys() == {name for name in want if not name.startswith("logits/")}
        got = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()} | measured
        found[case] = {name: relative(value, (gradients | want)[name]) for name, value in got.items()}
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("world", "family", "backend"),
    [(1, "StableLm", "cpu"), (2, "StableLm", "cpu"), slow(2, "StableLm", "cpu-sharded"), slow(2, "Nemotron", "cpu")],
)
def test_as_trl(world: int, family: str, backend: str) -> None:
    for case, errors in [each for found in ranks.run(_errors, world, family, backend) for each in found.items()]:
        assert max(errors.values()) <= TOLERANCE, (case, errors)


def bare(at: int) -> list[dict[str, Tensor]]:
    """The samples, of which one has no completion."""
    return [{**each, "labels": each["labels"] * (of != at) - 100 * (of == at)} for of, each in enumerate(samples())]


# Samples, the plan, whether it keeps pairs, whether there are sums over ranks; and what both ranks hear.
REFUSED = [
    (samples()[:9], "two ranks", True, True, "pair 4 has only sample 8: give its rejected sample, or drop it"),
    (bare(7), "two ranks", True, True, "pair 3: the completion of sample 7 has no tokens: drop the pair"),
    (samples(), "no pack on one rank", False, True, "without sample 5: give the plan pairs as groups"),
    (samples(), "pairs over ranks", True, False, "is on several ranks: give ORPO sums=SampleSums(model, samples=…)"),
]


class Dies(ORPO):
    def loss(self, *given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _refused(rank: int, world: int) -> list[str]:
    model, sums = sharded("StableLm")
    cases = [(ORPO, each, case, keeps, sums if summed else None) for each, case, keeps, summed, _ in REFUSED]
    cases.append((Dies if rank else ORPO, samples(), "pairs over ranks", True, sums))

    def step(kind: type[ORPO], each: Any, case: str, keeps: bool, given: SampleSums | None) -> None:
        orpo = kind(samples=each, sums=given)
        run_step(model, planned(case, keeps).packs(rank), orpo, collate=orpo.collate)

    return [caught(lambda case=case: step(*case)) for case in cases]


def test_bad_pairs_are_refused_and_a_killed_rank_is_named() -> None:
    with ranks.start(_refused, 2) as job:
        first, second = job.join()
    assert second.signal == signal.SIGKILL
    for said, words in zip(first.value, [*(words for *_, words in REFUSED), "RankLost: rank 1 died"], strict=True):
        assert words in said, said
