"""Packs that say where their documents begin: the same numbers as from their positions, whatever the model takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from odc_triton import hf
from odc_triton.packs.collate import pack_collate, to_device
from tests.hf.test_attention import LENGTHS, build
from tests.support.gradients import gradients_of

SHAPES = [LENGTHS, (24,), (1, 1, 1), (1, 30, 1)]


def _pack(lengths: tuple[int, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 97, (length,), generator=generator) for length in lengths]
    return to_device(pack_collate([[{"input_ids": document} for document in documents]])[0], "cpu")


def _bare(pack: dict[str, Any]) -> dict[str, Any]:
    return {name: pack[name] for name in ("input_ids", "position_ids", "labels")}


def _learnt(model: nn.Module, pack: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = hf.summed_loss(model, pack)
    loss.backward()
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients_of(model).items()}


def _assert_same(model: nn.Module, pack: dict[str, Any], other: dict[str, Any]) -> None:
    (loss, gradients), (want, want_gradients) = _learnt(model, pack), _learnt(model, other)
    assert torch.equal(loss, want)
    assert gradients.keys() == want_gradients.keys()
    assert gradients
    for name, gradient in want_gradients.items():
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("name", ["Qwen2", "Qwen2, windows", "Gemma3", "GPT2", "GptOss"])
def test_bitwise_the_same_with_and_without_bounds(name: str) -> None:
    model, pack = build(name), _pack((13,))
    assert "attention_mask" not in hf.model_inputs(pack, model)  # a single document needs no packing
    _assert_same(model, pack, _bare(pack))
    hf.enable_packing(model)
    for lengths in SHAPES:
        pack = _pack(lengths)
        assert "attention_mask" in hf.model_inputs(pack, model), "its mask need not be made"
        _assert_same(model, pack, _bare(pack))


def test_other_attention_afterwards_gets_no_prepared_mask() -> None:
    model, pack = build("Qwen2"), _pack((13,))
    hf.enable_packing(model)
    model.set_attn_implementation("sdpa")
    assert "attention_mask" not in hf.model_inputs(pack, model)
    _assert_same(model, pack, _bare(pack))


class _WithoutBounds(nn.Module):
    """A causal LM whose forward takes no further keywords."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        return self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


def test_a_model_that_takes_no_bounds() -> None:
    model = build("Qwen2")
    hf.enable_packing(model)
    outer = _WithoutBounds(copy.deepcopy(model))
    pack = _pack(LENGTHS)
    assert hf.model_inputs(pack, outer).keys() == {"input_ids", "position_ids", "use_cache"}
    assert hf.model_inputs(pack, model).keys() > {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    # The head runs on all positions there: the same sums of products, and one more in which they are zero.
    torch.testing.assert_close(_learnt(outer, pack)[0], _learnt(model, pack)[0], rtol=1e-6, atol=0)


def test_a_model_that_fails_on_a_prepared_mask_makes_its_own() -> None:
    class Particular(type(build("Qwen2"))):
        def forward(self, *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
            assert attention_mask is None or attention_mask.ndim == 2
            return super().forward(*args, attention_mask=attention_mask, **kwargs)

    model = build("Qwen2")
    model.__class__ = Particular
    hf.enable_packing(model)
    pack = _pack(LENGTHS)
    assert "attention_mask" not in hf.model_inputs(pack, model)
    _assert_same(model, pack, _bare(pack))


def test_bounds_are_a_leak_where_attention_joins_documents() -> None:
    q = torch.randn(1, 2, 6, 8)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    two, one = torch.tensor([0, 2, 6]), torch.tensor([0, 6])
    with pytest.raises(ValueError, match="see one another"):
        hf.packed_attention(nn.Module(), q, q, q, mask, cu_seq_lens_q=two, max_length_q=4)
    hf.packed_attention(nn.Module(), q, q, q, mask, cu_seq_lens_q=one, max_length_q=6)
