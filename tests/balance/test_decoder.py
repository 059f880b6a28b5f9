"""What the cost model reads of hybrids' configs, by their real modules on meta."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from odc_triton.balance import CostModel
from odc_triton.plan.decoder import Decoder, expert_count
from tests.support.versions import RECURRENT

_SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
_QWEN = _DELTA | {"head_dim": 16, "full_attention_interval": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40}
_LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4}
_KINDS = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_ZAMBA = {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"], "num_mem_blocks": 2}
# Of each family: what its config gets, its layers with attention and its recurrent ones, the FLOPs of their rule.
FAMILIES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "Qwen3Next": (_QWEN | _SHARED | {"mlp_only_layers": [1]}, 2, 2, 6 * 4 * 8 * 16),
    "Qwen3_5Text": (_QWEN, 2, 2, 6 * 4 * 8 * 16),
    "Qwen3_5MoeText": (_QWEN | _SHARED, 2, 2, 6 * 4 * 8 * 16),
    "OlmoHybrid": (_DELTA | _KINDS | {"linear_num_key_heads": 4}, 2, 2, 6 * 4 * 8 * 16),
    "KimiLinear": (
        _LATENT | _EXPERTS | _KINDS | {"linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4},
        2,
        2,
        6 * 4 * 8 * 8,
    ),
    "BailingHybrid": (
        _LATENT | _EXPERTS | _KINDS | {"head_dim": 8, "num_local_experts": 4, "n_group": 1, "topk_group": 1},
        2,
        2,
        6 * 4 * 8 * 8,
    ),
    "NemotronH": (
        _NEMOTRON
        | _EXPERTS
        | {"head_dim": 16, "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 32}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]},
        1,
        2,
        4 * 8 * 8 * 16,
    ),
    "GraniteMoeHybrid": (_MAMBA | _KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2}, 2, 2, 4 * 8 * 8 * 16),
    "GraniteMoeHybrid dense": (_MAMBA | _KINDS | {"num_local_experts": 0}, 2, 2, 4 * 8 * 8 * 16),
    "FalconH1": (_MAMBA | {"mamba_d_ssm": 128, "head_dim": 16}, 4, 4, 4 * 8 * 8 * 16),
    "Bamba": (_MAMBA | {"attn_layer_indices": [1, 3]}, 2, 2, 4 * 8 * 8 * 16),
    "Zamba2": (_ZAMBA | {"n_mamba_heads": 8, "mamba_d_state": 8, "adapter_rank": 8}, 2, 4, 4 * 8 * 8 * 16),
    "Lfm2": (_CONVOLUTIONS, 2, 2, 0),
    "Lfm2Moe": (_CONVOLUTIONS | _EXPERTS | {"num_experts": 4, "num_dense_layers": 1}, 2, 2, 0),
    "Lfm3": (_CONVOLUTIONS | {"head_dim": 16}, 2, 2, 0),
}


def config_of(name: str) -> Any:
    family = name.split()[0]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return getattr(transformers, f"{family}Config")(**_SIZES | FAMILIES[name][0])


@RECURRENT
@pytest.mark.parametrize("name", FAMILIES)
def test_a_hybrids_layers_and_its_matrices_are_those_of_its_modules(name: str) -> None:
    config, (_, attending, recurring, flops) = config_of(name), FAMILIES[name]
    with torch.device("meta"):
        model = getattr(transformers, f"{name.split()[0].removesuffix('Text')}ForCausalLM")(config)
    active, experts = 0, expert_count(config)
    for layer in model.model.layers:  # shared blocks count in each layer that has them
        for path, parameter in layer.named_parameters():
            part = config.num_experts_per_tok / experts if ".experts." in path else 1
            active += parameter.numel() * part * (parameter.dim() > 1 and "A_log" not in path)
    decoder = Decoder.of(config)
    assert (decoder.active, decoder.attending, decoder.recurring) == (active, attending, recurring)
    cost, slow = CostModel.from_config(config), CostModel.from_config(config, rule=3.0)
    assert cost.quadratic == 3 * attending * decoder.heads * (decoder.key_width + decoder.value_width)
    assert cost.linear == 6 * (active + decoder.table) + 3 * recurring * flops
    paired = name.split()[0] not in ("NemotronH", "GraniteMoeHybrid", "FalconH1", "Bamba", "Zamba2")
    assert cost.pair == pytest.approx(0.48 * 3 * recurring * flops * paired)
    assert slow == replace(cost, linear=cost.linear + 6 * recurring * flops, pair=slow.pair)
    assert slow.pair == pytest.approx(3 * cost.pair)
