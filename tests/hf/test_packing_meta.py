"""enable_packing on models that have no weights yet: proved on a small model of the same class and config."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from odc_triton.hf import PackingUnsupported, enable_packing
from odc_triton.packs.enable import ATTENTION_NAME, stand_in
from tests.support import slow
from tests.support.versions import since

# As large ones are configured, but for the number of experts.
LARGE = {
    "Qwen2": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "pad_token_id": 151643},
    "Qwen3Moe": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 8},
    "Mistral": {"sliding_window": 4096},
    "GPT2": {},
    "Gemma3nText": {"hidden_size": 256, "head_dim": 32},  # its last 15 layers have the keys of others
    "Cwm": {},
    "SolarOpen": {"n_routed_experts": 8},
}


def _on_meta(name: str, **options: object) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**options)
    with torch.device("meta"):
        return getattr(
            transformers, f"{name.removesuffix('Text')}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}"
        )(config)


SLOW = ("Gemma3nText", "Cwm", "SolarOpen")  # a second each


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in LARGE])
def test_large_models(name: str) -> None:
    model = _on_meta(name, **LARGE[name])
    random_state = torch.get_rng_state()
    small = stand_in(model)
    assert type(small) is type(model)
    bound = 50e6 if name == "GPT2" else 10e6  # it has other names for its widths
    assert sum(parameter.numel() for parameter in small.parameters()) < bound
    enable_packing(model)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_every_kind_of_layer_is_there() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=34, sliding_window=4, vocab_size=300)
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    kinds = stand_in(model).config.layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}
    assert len(kinds) == 6
    enable_packing(model)
    assert model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize(
    "name", ["Qwen2_5_VL", pytest.param("Gemma3", marks=since("5.6", "it trains with a mask of its own only"))]
)
def test_models_with_a_tower_of_full_size(name: str) -> None:
    with torch.device("meta"):
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
        qwen = {"vision_config": {"hidden_size": 1280}, "text_config": {"rope_parameters": rope}}
        sizes = qwen if name == "Qwen2_5_VL" else {}  # as its models have it
        model = getattr(transformers, f"{name}ForConditionalGeneration")(
            getattr(transformers, f"{name}Config")(**sizes)
        )
    assert sum(each.numel() for each in stand_in(model).parameters()) < 2e8  # one of the tower's layers
    enable_packing(model)
    assert model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    assert model.config.vision_config._attn_implementation != ATTENTION_NAME
    assert model._odc_takes_branches


def test_what_carries_state_is_refused() -> None:
    config = transformers.Mamba2Config(hidden_size=32, num_hidden_layers=4, num_heads=8, head_dim=8, vocab_size=99)
    with torch.device("meta"):
        model = transformers.Mamba2ForCausalLM(config)
    with pytest.raises(PackingUnsupported):
        enable_packing(model)
