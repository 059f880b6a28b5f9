"""CrossEntropy of one pack against formulas on full logits, with every option alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from odc_triton import divergence, fully_shard
from odc_triton.balance import pack_collate
from odc_triton.objectives import CrossEntropy, Distillation, Teacher, Terms
from odc_triton.packs.loss import predictions
from tests.support.splitting import Setup, build, samples

SMOOTHING = 0.2
CASES = [{}, {"label_smoothing": SMOOTHING}, {"dft": True}]


@pytest.mark.parametrize("measures", [False, True])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_loss_and_sums(options: dict, measures: bool) -> None:
    setup = Setup(empty_start=True)
    model = build(setup, replaced=False).double()
    (pack,) = pack_collate([samples(setup)[:2]])
    loss, sums = CrossEntropy(measures=measures, **options).loss(model, pack, Terms(number=7))
    logits, targets = predictions(model, pack)
    logp = logits.float().log_softmax(-1)  # losses are in fp32, whatever the model is
    chosen = logp.gather(1, targets[:, None])[:, 0]
    if options.get("dft"):
        want = -(chosen * chosen.detach().exp()).sum()
    else:
        smoothing = options.get("label_smoothing", 0.0)
        want = -((1 - smoothing) * chosen + smoothing * logp.mean(1)).sum()
    given = [*model.parameters()]
    found, wanted = (torch.autograd.grad(of, given, retain_graph=True) for of in (loss, want / 7))
    torch.testing.assert_close(loss, want / 7)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(sums["token_loss"], want)
    if measures:
        torch.testing.assert_close(sums["entropy"], -(logp.exp() * logp).sum())
        assert sums["accuracy"] == (logits.argmax(1) == targets).sum()
    assert F.cross_entropy(logits.float(), targets, reduction="sum") != want or not options, "the option shows"


@pytest.mark.parametrize(("weight", "measures"), [(0.3, False), (0.3, True), (1.0, False), (1.0, True)])
def test_a_teachers_part(weight: float, measures: bool) -> None:
    setup = Setup()
    model, other = (fully_shard(build(each, replaced=False)) for each in (setup, Setup(family="Llama")))
    (pack,) = pack_collate([samples(setup)[:2]])
    teacher = Teacher(other, model, beta=0.5, temperature=2.0, weight=weight)
    loss, sums = Distillation(teacher=teacher, measures=measures).loss(model, pack, Terms(number=7))
    with torch.no_grad():
        (logits, targets), (theirs, _) = (predictions(each, pack) for each in (model, other))
    apart = divergence(logits, theirs, beta=0.5, temperature=2.0).sum()
    mixed = weight * apart + (1 - weight) * F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(sums["divergence"].detach(), apart)
    torch.testing.assert_close(sums["token_loss"].detach(), mixed)
    torch.testing.assert_close(loss.detach(), mixed / 7)
    assert ("entropy" in sums, "accuracy" in sums) == (measures, measures)


@pytest.mark.parametrize("wrong", [{"label_smoothing": 2}, {"label_smoothing": 0.1, "dft": True}], ids=str)
def test_options_that_do_not_fit(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"label_smoothing is .*: give a number from 0 to 1, with dft 0"):
        CrossEntropy(**wrong)
