"""ORPO on real ranks, against TRL's own ORPOTrainer on one padded batch of all pairs and a whole model, in fp64."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from odc_triton import enable_split, fully_shard
from odc_triton.balance import CostModel, Limits, Plan, Samples, find_relatives, make_plan
from odc_triton.hf import enable_packing
from odc_triton.objectives import ORPO, SampleSums, evaluate, run_step
from odc_triton.plan.line import count_tokens
from tests.sequence.test_branches import samples_of, tokens
from tests.support import ranks, slow
from tests.support.families import causal_lm
from tests.support.refusals import caught

# Of each pair the tokens of its prompt, of the chosen and of the rejected completion; pairs 0 and 1 have one prompt.
PAIRS = ((40, 9, 5), (40, 1, 12), (3, 20, 17), (36, 6, 1), (1, 30, 8))
COMPLETIONS = ((pair, side) for pair in range(len(PAIRS)) for side in (1, 2))
SAMPLES = samples_of(*((tokens(PAIRS[at][0], max(at, 1)), tokens(PAIRS[at][i], 9 * at + i)) for at, i in COMPLETIONS))
LENGTHS = [len(each["labels"]) for each in SAMPLES]
ALL, BETA, TOLERANCE = (0, 1, 2, 3, 4), 0.7, 1e-10  # of norms: sums in another order, in fp64
# Ranks, pairs, tokens of a pack, whether prompts are shared, tokens that others may read; of the plan the tokens that
# are computed, and the pairs over ranks.
CASES = {
    "one pack": (1, ALL, 500, False, 0, (349, set())),
    "chosen ones branch from a rejected one": (1, ALL, 500, True, 0, (197, set())),
    "two packs": (1, ALL, 150, True, 0, (197, set())),
    "two ranks": (2, ALL, 150, True, 0, (197, set())),
    "no pack on one rank": (2, (2,), 150, False, 0, (43, set())),
    "pairs over ranks": (2, ALL, 60, False, 200, (349, {0, 1, 3})),
    "a prompt's part on one rank": (2, (1,), 50, True, 100, (54, {1})),
    "all in segments": (2, ALL, 30, True, 200, (236, {*ALL})),
}


@mock.patch("odc_triton.plan.shared.LEAST_TOKENS", 2)  # of a segment
def planned(case: str, grouped: bool = True) -> Plan:
    world, pairs, cap, shares, read, _ = CASES[case]
    names = [2 * pair + side for pair in pairs for side in (0, 1)]
    columns = {"names": names, "groups": [name // 2 for name in names] if grouped else None}
    columns["prefixes"] = find_relatives([SAMPLES[name] for name in names]) if shares else None
    samples = Samples.of([LENGTHS[name] for name in names], CostModel(quadratic=0.01, linear=1.0), **columns)
    return make_plan(samples, Limits(ranks=world, token_cap=cap, split_tokens=read))


def model_of(backend: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = causal_lm("StableLm", attention="sdpa").double()
    if backend is not None:
        enable_packing(model)
        enable_split(model := fully_shard(model, backend=backend), tokens=200)
    return model


def by_trl(pairs: tuple[int, ...]) -> dict[str, Any]:
    from trl.experimental import orpo, utils

    masked = [each | {"attention_mask": [1] * len(each["labels"])} for each in SAMPLES]
    sides = (("chosen", 0), ("rejected", 1))
    rows = [{f"{side}_{of}": ids for side, at in sides for of, ids in masked[2 * i + at].items()} for i in pairs]
    trainer, model = object.__new__(orpo.ORPOTrainer), model_of(None)
    trainer.accelerator = mock.Mock(device=torch.device("cpu"), gather_for_metrics=lambda each: each)
    vars(trainer).update(beta=BETA, is_encoder_decoder=False, aux_loss_enabled=False, padding_value=0)
    loss, metrics = trainer.get_batch_loss_metrics(model, utils.DPODataCollatorWithPadding(0)(rows))
    loss.backward()
    return {"loss": loss.detach(), **metrics, **{name: p.grad for name, p in model.named_parameters()}}


def _errors(rank: int, world: int, backend: str) -> dict[tuple[str, str], float]:
    """Relative errors by case and name: of a step's loss and gradients, and an evaluation's other numbers."""
    model, found = model_of(backend), {}
    orpo = ORPO(samples=SAMPLES, beta=BETA, sums=SampleSums(model, samples=len(SAMPLES)))
    for case, (_, pairs, *_, expected) in [each for each in CASES.items() if each[1][0] == world]:
        plan = planned(case)
        over = {each.segment.sample // 2 for each in plan.split.segments} if plan.split else set()
        assert (sum(count_tokens(pack, LENGTHS) for own in plan.ready for pack in own), over) == expected
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # of TRL's loss, and the model's rope
            want, packs = by_trl(pairs), plan.packs(rank)
            got = {"loss": run_step(model, packs, orpo, collate=orpo.collate).loss}
            got = orpo.means(evaluate(model, [packs], orpo, collate=orpo.collate).sums) | got
        got |= {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        assert want.keys() - got.keys() == {"logits/chosen", "logits/rejected"}
        for name in got:
            ours, trl = (torch.as_tensor(each[name], dtype=torch.float64) for each in (got, want))
            found[case, name] = float((ours - trl).norm() / (trl.norm() or 1))
        model.zero_grad()
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
@pytest.mark.parametrize(("world", "backend"), [(1, "cpu"), (2, "cpu"), slow(1, "cpu-sharded"), slow(2, "cpu-sharded")])
def test_as_trl(world: int, backend: str) -> None:
    for found in ranks.run(_errors, world, backend):
        assert max(found.values()) <= TOLERANCE, found


BARE = [*SAMPLES[:7], *samples_of(([5] * 37, [])), *SAMPLES[8:]]
# Samples, their plan, whether it keeps pairs, whether there are sums; what rank 0 hears. In the last one rank 1 dies.
FAILURES = [
    (SAMPLES[:9], "two ranks", True, True, "pair 4 has only sample 8: give its rejected sample, or drop it"),
    (BARE, "two ranks", True, True, "pair 3: the completion of sample 7 has no tokens to predict: drop the pair"),
    (
        [*SAMPLES[:4], {"input_ids": [5]}, *SAMPLES[5:]],
        "no pack on one rank",
        True,
        True,
        "pair 2: sample 4 has no label",
    ),
    (SAMPLES, "no pack on one rank", False, True, "pair 2: sample . is packed without .: plan with pairs as groups"),
    (SAMPLES, "pairs over ranks", True, False, "pair . is on several ranks: give ORPO sums=SampleSums"),
    (SAMPLES, "pairs over ranks", True, True, "RankLost: .* rank 1 died"),
]


def _failures(rank: int, world: int) -> list[str]:
    model = model_of("cpu")
    sums = SampleSums(model, samples=len(SAMPLES))

    def step(samples: Any, case: str, grouped: bool, summed: bool, _: str) -> None:
        orpo = ORPO(samples=samples, sums=sums if summed else None)
        run_step(model, planned(case, grouped).packs(rank), orpo, collate=orpo.collate)

    said = [caught(lambda row=row: step(*row)) for row in FAILURES[:-1]]
    if rank == 1:
        ORPO.loss = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return [*said, caught(lambda: step(*FAILURES[-1]))]


def test_bad_pairs_are_refused_and_a_killed_rank_is_named() -> None:
    with ranks.start(_failures, 2) as job:
        first, second = job.join()
    assert second.signal == signal.SIGKILL
    assert all(re.search(words, said) for (*_, words), said in zip(FAILURES, first.value, strict=True)), first.value
