"""verify: a replaced model against its own layers, and that it finds what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from odc_triton import OdcError, fully_shard, replace_layers, verify
from odc_triton.nn import LMHead
from tests.nn.test_head import build
from tests.support.families import causal_lm, with_lora


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 97, (2, 19))
    return {"input_ids": ids, "labels": ids}


def _replaced(name: str = "Qwen2") -> nn.Module:
    model = build(name)
    replace_layers(model, roles=["head"], verbose=False)
    return model


@pytest.mark.parametrize("name", ["Qwen2", "Qwen2, tied", "GPT2"])
def test_equal_models_pass_and_stay_as_they_are(name: str) -> None:
    model = _replaced(name)
    batch = _batch() | {"use_cache": False}
    rng, before = torch.get_rng_state(), {key: value.clone() for key, value in model.state_dict().items()}
    found = verify(model, batch)
    assert found.gradients == len(list(model.parameters()))
    assert found.worst[1] <= 1e-5
    assert "differs most" in str(found)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(model.lm_head, LMHead)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_adapters_of_experts() -> None:
    names = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    model = with_lora(causal_lm("Mixtral"), target_parameters=names, lora_dropout=0.0)
    replace_layers(model, roles=["experts"], verbose=False)
    found = verify(model, _batch())
    assert (found.gradients, found.worst[1] <= 1e-5) == (2 * 4 * 2, True)  # of two layers A and B of four


class _Scaled(LMHead):
    """A head that is wrong on purpose."""

    def forward(self, h: torch.Tensor) -> object:
        return super().forward(h) * 1.01


class _Detached(LMHead):
    def forward(self, h: torch.Tensor) -> object:
        return super().forward(h.detach())


class _Steep(LMHead):
    """Of which only the gradients are wrong."""

    def forward(self, h: torch.Tensor) -> object:
        h.register_hook(lambda gradient: gradient * 1.01)
        return super().forward(h)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_Scaled, "the loss is"),
        (_Detached, r"model\.embed_tokens\.weight has no gradient"),
        (_Steep, r"the gradient of .* differs by 1\.0e-02"),
    ],
)
def test_a_difference_is_named(wrong: type, words: str) -> None:
    model = _replaced()
    model.lm_head.__class__ = wrong
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # so that one percent shows in the loss
    with pytest.raises(OdcError, match=words):
        verify(model, _batch())


def test_what_cant_be_compared() -> None:
    with pytest.raises(ValueError, match="none of the model's layers is replaced"):
        verify(build("Llama"), _batch())
    with pytest.raises(ValueError, match=r"returned no loss for \['input_ids'\]; add labels"):
        verify(_replaced(), {"input_ids": _batch()["input_ids"]})
    with pytest.raises(ValueError, match="before fully_shard"):
        verify(fully_shard(_replaced(), backend="cpu"), _batch())


@pytest.mark.parametrize(
    ("change", "batch", "loss", "words"),
    [
        (lambda model: model.eval(), {}, None, r"the head lm_head is in evaluation mode.*call model.train\(\)"),
        (lambda model: model.to("meta"), {}, None, "the model is on meta"),
        (lambda model: model.requires_grad_(False), {}, None, "none of the model's parameters trains"),
        (lambda model: None, torch.zeros(2), None, "batch is a Tensor; give a mapping"),
        (lambda model: None, {}, lambda model, batch: torch.zeros(3, requires_grad=True), r"loss= returned \(3,\)"),
        (
            lambda model: None,
            {"labels": torch.full((1, 5), -100)},
            None,
            "the loss is nan: does the batch have a label",
        ),
    ],
)
def test_what_cannot_be_verified(change: Callable, batch: Any, loss: Callable | None, words: str) -> None:
    model = build("Llama").train()
    replace_layers(model, roles=["head", "linear"], verbose=False)
    change(model)
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    whole = {"input_ids": ids, "labels": ids} | batch if isinstance(batch, dict) else batch
    with pytest.raises(ValueError, match=words):
        verify(model, whole, loss=loss)
