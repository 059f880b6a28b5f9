"""Distillation in a loop of yours: `divergence` and `distillation_loss`, against TRL's loss of full logits."""

from __future__ import annotations

import os
import sys
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from odc_triton import divergence, fully_shard, minibatch
from odc_triton.balance import pack_collate
from odc_triton.hf import distillation_loss, enable_packing
from odc_triton.nn import LMHead
from odc_triton.nn.head import FusedLogits
from odc_triton.nn.replace import replace_layers
from tests.support import ranks, slow
from tests.support.families import causal_lm
from tests.support.gradients import assert_same_gradients, gradients_of
from tests.support.peak_memory import peak_bytes

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")

HOW = {"beta": 0.3, "temperature": 1.5}
LENGTHS = (7, 3, 12, 5, 1, 9)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}  # of a gradient's norm; torch's own fp32 is 4e-6 off


def trl(student: Tensor, teacher: Tensor, *, beta: float, temperature: float = 1.0) -> Tensor:
    with mock.patch.dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1"):
        from trl.experimental.gkd import GKDTrainer
    how = {"beta": beta, "temperature": temperature, "reduction": "none"}
    return GKDTrainer.generalized_jsd_loss(student, teacher, **how).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_trl(beta: float, dtype: torch.dtype) -> None:
    """Logits as numbers, and of two fused heads, at a temperature."""
    torch.manual_seed(0)
    h, teacher_h = torch.randn(2, 5, 8, dtype=dtype), torch.randn(2, 5, 12, dtype=dtype)
    weight, theirs = torch.randn(50, 8, dtype=dtype), torch.randn(50, 12, dtype=dtype)
    how, g = {"beta": beta, "temperature": 2.0}, torch.randn(2, 5, dtype=dtype)

    def found(of: str) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (h, weight, teacher_h, theirs)]
        if of == "fused":
            apart = divergence(FusedLogits(*leaves[:2]), FusedLogits(*leaves[2:]), **how)
        else:
            logits = leaves[0] @ leaves[1].T, leaves[2] @ leaves[3].T
            apart = divergence(*logits, **how) if of == "numbers" else trl(logits[0], logits[1].detach(), **how)
        (apart * g).sum().backward()
        assert leaves[2].grad is None
        assert leaves[3].grad is None
        return [apart.detach(), leaves[0].grad, leaves[1].grad]

    want = found("TRL")
    for of in ("numbers", "fused"):
        for name, got, expected in zip(("D", "dh", "dW"), found(of), want, strict=True):
            assert got.dtype == dtype
            limit = (1e-6 if name == "D" else 1e-5) if dtype == torch.float32 else 1e-12
            assert (got - expected).norm() <= limit * expected.norm(), f"{of}: {name}"


@pytest.mark.parametrize("fused", [False, True])
def test_words_that_one_of_them_lacks_do_not_count(fused: bool) -> None:
    h, weight, theirs = torch.randn(4, 8), torch.randn(50, 8), torch.randn(60, 8)
    of = FusedLogits if fused else F.linear
    want = trl(h @ weight.T, h @ theirs[:50].T, beta=0.5)
    torch.testing.assert_close(divergence(of(h, weight), of(h, theirs)), want, rtol=1e-5, atol=1e-6)
    want = trl(h @ theirs[:50].T, h @ weight.T, beta=0.5)
    torch.testing.assert_close(divergence(of(h, theirs), of(h, weight)), want, rtol=1e-5, atol=1e-6)


def test_a_quarter_of_the_memory() -> None:
    h = torch.randn(512, 16, requires_grad=True)
    heads = LMHead(16, 16384), LMHead(16, 16384).requires_grad_(False)
    fused = peak_bytes(lambda: divergence(heads[0](h), heads[1](h)).sum().backward())
    heads[0].zero_grad()
    whole = [lambda at=at: F.linear(h.detach() if at else h, heads[at].weight) for at in (0, 1)]
    for way in (divergence, lambda *logits: trl(*logits, beta=0.5)):
        plain = peak_bytes(lambda way=way: way(*(each() for each in whole)).sum().backward())
        assert fused <= plain / 4


@pytest.mark.parametrize(
    ("student", "teacher", "how", "said"),
    [
        (torch.ones(3, 5), torch.ones(2, 5), {}, r"a tensor of \(3, 5\), the teacher's a tensor of \(2, 5\)"),
        (torch.ones(3, 5), FusedLogits(torch.ones(3, 4), torch.ones(5, 4)), {}, "in both models or in neither"),
        (torch.ones(3, 5), torch.ones(3, 5), {"beta": -0.1}, r"beta is -0\.1"),
        (torch.ones(3, 5), torch.ones(3, 5), {"temperature": 0.0}, r"temperature 0\.0: give"),
        (FusedLogits(torch.ones(3, 4), torch.ones(5, 4)),) * 2 + ({"beta": 2.0}, r"beta is 2\.0"),
    ],
)
def test_wrong_inputs_are_named(student: Tensor, teacher: Tensor, how: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        divergence(student, teacher, **how)


# ------------------------------------------------------------------ on ranks


def models(dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(0)
    return [causal_lm("Qwen2", attention="sdpa", spread=0.2, **sizes).to(dtype) for sizes in ({}, {"hidden_size": 48})]


def samples() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": each, "labels": [-100] * (len(each) // 3) + each[len(each) // 3 :]} for each in ids]


def step(rank: int, world: int, cases: list[tuple[torch.dtype, bool, str]]) -> list[tuple[float, dict]]:
    """Of each case this rank's part of the loss, and whole gradients."""
    found = []
    for dtype, fused, backend in cases:
        model, teacher = models(dtype)
        for each in (model, teacher):
            enable_packing(each)
            if fused:
                replace_layers(each, roles=["head"], verbose=False)
        teacher.requires_grad_(False)
        model, teacher = fully_shard(model.train(), backend=backend), fully_shard(teacher.train(), backend=backend)
        every, loss_sum, modes = samples(), 0.0, [each.training for each in teacher.modules()]
        dealt = [[[0, 3], [1], [4, 5]], [[2]]][rank]
        packs = pack_collate([[every[index] for index in pack] for pack in dealt])
        with minibatch(model, tokens=sum(int((pack["labels"] != -100).sum()) for pack in packs)) as mb:
            for pack in packs:
                loss = distillation_loss(model, teacher, pack, **HOW) / mb.tokens
                loss.backward()
                loss_sum += loss.item()
        assert [each.training for each in teacher.modules()] == modes
        assert all(each.grad is None for each in teacher.parameters())
        found.append((loss_sum, {name: p.grad.full_tensor() for name, p in model.named_parameters()}))
    return found


CASES = [(torch.float64, False, "cpu"), (torch.float32, True, "cpu-sharded")]
MORE = [(torch.float32, True, "cpu"), (torch.float32, False, "cpu"), (torch.float64, False, "cpu-sharded")]


@pytest.mark.parametrize("cases", [CASES, slow(MORE)], ids=["usual", "more"])
def test_a_loop_of_ones_own(cases: list) -> None:
    """Rank 0 has three packs, rank 1 one; the teacher is read by whoever computes, in evaluation mode."""
    of_ranks = ranks.run(step, 2, cases)
    for at, (dtype, *_) in enumerate(cases):
        model, teacher = models(dtype)
        apart, targets = 0.0, 0
        for sample in samples():
            ids, learned = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])[1:] != -100
            with torch.no_grad():
                theirs = teacher.eval()(input_ids=ids).logits[0, :-1][learned]
            apart = apart + trl(model(input_ids=ids).logits[0, :-1][learned], theirs, **HOW).sum()
            targets += int(learned.sum())
        (apart / targets).backward()
        assert sum(found[at][0] for found in of_ranks) == pytest.approx((apart / targets).item(), rel=1e-6)
        tolerance = TOLERANCE[dtype]
        assert_same_gradients(of_ranks[0][at][1], gradients_of(model), tolerance, floor=1e-2 * tolerance)


def test_a_teacher_that_is_the_student() -> None:
    """Each of its modules has its own mode again, so later packs have dropout; gradients are those of two models."""
    (model, _), own = models(torch.float64), samples()[0]
    packs = pack_collate([[own], [own]])
    teacher = models(torch.float64)[0].eval()
    for each in (model, teacher):
        each.config.attention_dropout = 0.5
        enable_packing(each)
    model.train().model.layers[1].eval()
    pair = fully_shard(model), fully_shard(teacher.requires_grad_(False))
    modes, found = [each.training for each in model.modules()], []
    for taught_by in pair:
        torch.manual_seed(0)
        with minibatch(model):
            for pack in packs:
                distillation_loss(model, taught_by, pack, **HOW).backward()
        assert [each.training for each in model.modules()] == modes
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        model.zero_grad()
    assert any(gradient.any() for gradient in found[0].values())
    assert_same_gradients(*found, 1e-12, floor=1e-14)
