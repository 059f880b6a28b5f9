"""CrossEntropy of one pack against formulas on whole logits, with every option alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from odc_triton.balance import pack_collate
from odc_triton.objectives import CrossEntropy, Terms
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
