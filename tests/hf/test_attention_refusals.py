"""Models, layers, masks and arguments that attention over packs can't honour are refused."""

import copy

import pytest
import torch
import transformers
from transformers import masking_utils

from odc_triton import hf
from tests.hf.test_attention import build
from tests.support.families import causal_lm
from tests.support.models import build as build_case
from tests.support.versions import since

REFUSED = {
    "Bloom": (lambda: causal_lm("Bloom"), "BloomForCausalLM can't be trained on packs"),
    "bert": (lambda: build_case("bert"), "BertForSequenceClassification can't be trained on packs"),
    "Mamba": (lambda: causal_lm("Mamba"), "MambaForCausalLM can't be trained on packs"),
    # Its attention is not told of its chunked masks, nor of positions.
    "Llama4": (lambda: causal_lm("Llama4"), "neither position_ids nor cu_seq_lens_q"),
    "linear": (lambda: torch.nn.Linear(2, 2), "Linear is not a transformers model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_former_attention(name):
    make, message = REFUSED[name]
    torch.manual_seed(0)
    model = make().train()
    former = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(hf.PackingUnsupported, match=message) as refusal:
        hf.enable_packing(model)
    assert "train this model in your loop, one sequence per microbatch" in str(refusal.value)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == former
    assert all(module.training for module in model.modules())


def test_a_layer_that_leaks_or_differs_is_refused(monkeypatch):
    """The probe's two checks of values, on a model that calls our attention in every layer as it should."""
    decoder = transformers.models.qwen2.modeling_qwen2.Qwen2MLP
    forward = decoder.forward
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward", lambda self, x: forward(self, x) + 0.1 * x.roll(1, dims=1))
        with pytest.raises(hf.PackingUnsupported, match="changed when only its neighbour's tokens did"):
            hf.enable_packing(build("Qwen2"))
    model = build("Qwen2")
    attention = transformers.models.qwen2.modeling_qwen2.Qwen2Attention
    inner = attention.forward

    def other_scale_when_packed(self, *args, **kwargs):
        self.scaling = 0.1 if self.config._attn_implementation == "odc_packed" else 1.0
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", other_scale_when_packed)
    with pytest.raises(hf.PackingUnsupported, match="not those of each document alone"):
        hf.enable_packing(model)


def test_a_window_that_attention_is_not_told_of_is_refused(monkeypatch):
    """The window is wider than the probe's documents, so that no logits show it."""
    attention = transformers.models.mistral.modeling_mistral.MistralAttention
    forward = attention.forward

    def without_window(self, *args, **kwargs):
        told, self.config = self.config, copy.copy(self.config)
        self.config.sliding_window = None
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config = told

    monkeypatch.setattr(attention, "forward", without_window)
    model = causal_lm("Mistral", sliding_window=32)
    with pytest.raises(hf.PackingUnsupported, match=r"windows or chunks of \[32\] tokens"):
        hf.enable_packing(model)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("overlay", "overlay that a pack would drop"),
        pytest.param("blocks", "an overlay|not plain causal", marks=since("5.9", "masks have no blocks")),
        ("wider", "mask is not plain causal"),
    ],
)
def test_a_mask_of_the_models_own_is_refused(how, message, monkeypatch):
    modeling = transformers.models.qwen2.modeling_qwen2
    inner = modeling.create_causal_mask

    def overlaid(config, **kwargs):
        if how == "overlay":
            return inner(config, **kwargs, and_mask_function=lambda b, h, q, k: q - k != 2)
        length = kwargs["inputs_embeds"].shape[1]
        if how == "wider":
            monkeypatch.setattr(masking_utils, "causal_mask_function", lambda b, h, q, k: k <= q + 1)
            return inner(config, **kwargs)
        return inner(config, **kwargs | {"block_sequence_ids": torch.zeros(1, length, dtype=torch.long)})

    monkeypatch.setattr(modeling, "create_causal_mask", overlaid)
    with pytest.raises(hf.PackingUnsupported, match=message):
        hf.enable_packing(build("Qwen2"))


@pytest.mark.parametrize("name", ["position_bias", "sinks", "indices", "block_indices"])
def test_arguments_that_a_pack_cannot_honour_are_refused(name):
    module = torch.nn.Module()
    q = torch.randn(1, 2, 6, 4)
    options = {"position_ids": torch.arange(6)[None], name: torch.zeros(1)}
    with pytest.raises(hf.PackingUnsupported, match=f"Module uses `{name}`"):
        hf.packed_attention(module, q, q, q, None, **options)
    with pytest.raises(hf.PackingUnsupported, match="neither position_ids nor cu_seq_lens_q"):
        hf.packed_attention(module, q, q, q, None)
    module.is_causal = False
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="without causal attention"):
        hf.packed_attention(module, q, q, q, None, position_ids=positions)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
    actual, _ = hf.packed_attention(module, q, q, q, None, position_ids=torch.arange(6)[None])
    torch.testing.assert_close(actual, expected)
