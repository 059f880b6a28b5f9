"""Mixtures of experts on packs: each document by itself, and a router's own loss, which can't be summed."""

from __future__ import annotations

import copy

import pytest
import torch

from odc_triton import hf
from tests.hf.test_attention import LENGTHS, assert_same_grads, grads, make_pack
from tests.support import slow
from tests.support.models import MIXTURES, build


@pytest.mark.parametrize("name", ["deepseek-v3", *(slow(name) for name in MIXTURES if name != "deepseek-v3")])
def test_loss_and_gradients_of_a_pack(name: str) -> None:
    """Against transformers' own attention, on one document after another."""
    alone = build(name)
    packed = copy.deepcopy(alone)
    hf.enable_packing(packed)
    pack = make_pack()
    loss = hf.summed_loss(packed, pack)
    loss.backward()

    expected = torch.zeros(())
    ids, labels = (pack[key].split(LENGTHS, dim=1) for key in ("input_ids", "labels"))
    for document, targets in zip(ids, labels, strict=True):
        logits = alone(input_ids=document, use_cache=False).logits[0, :-1]
        expected = expected + torch.nn.functional.cross_entropy(logits, targets[0, 1:], reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    assert_same_grads(grads(packed), grads(alone))


@pytest.mark.parametrize("name", ["mixtral", slow("qwen3-moe-dense"), slow("gpt-oss")])
def test_a_routers_loss_is_refused(name: str) -> None:
    model, pack = build(name), make_pack()
    hf.enable_packing(model)
    want = hf.summed_loss(model, pack)
    model.config.output_router_logits = True
    with_labels = model(input_ids=pack["input_ids"], labels=pack["input_ids"], use_cache=False)
    assert with_labels.aux_loss > 0  # transformers adds it
    with pytest.raises(
        ValueError, match=r"output_router_logits=True, router_aux_loss_coef=0\.001\).*set model\.config"
    ):
        hf.summed_loss(model, pack)
    model.config.router_aux_loss_coef = 0.0  # weighs nothing
    assert torch.equal(hf.summed_loss(model, pack), want)


def test_logits_of_a_router_without_a_loss_are_no_reason_to_refuse() -> None:
    model, pack = build("deepseek-v3"), make_pack()
    hf.enable_packing(model)
    want = hf.summed_loss(model, pack)
    model.config.output_router_logits = True
    assert torch.equal(hf.summed_loss(model, pack), want)
