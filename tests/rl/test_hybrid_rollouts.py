"""Sampling from models with recurrent layers: prompts of other lengths beside one change none of its probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.packs.padding import padding_leaks
from tests.support import ranks
from tests.support.sampling import log_probabilities
from tests.support.versions import RECURRENT

COMMON = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
COMMON |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GDN = {"head_dim": 8, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
GDN |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
KDA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KDA |= {
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": GDN["layer_types"],
}
KDA |= {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SSD = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
NEMOTRON = {"layers_block_type": ["mamba", "attention", "mamba", "moe"], "head_dim": 8, "ssm_state_size": 8}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 4, "n_routed_experts": 4}
NEMOTRON |= {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
ZAMBA = {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 4}
LFM = {"layer_types": ["conv", "full_attention", "conv"]}
GRANITE = SSD | {"shared_intermediate_size": 48, "layer_types": ["mamba", "attention", "mamba"]}

# Config's name without `Config`, its arguments, and whether a projection before a convolution has a bias.
FAST = [("Qwen3_5Text", GDN, False), ("NemotronH", NEMOTRON | {"use_bias": True, "mamba_proj_bias": True}, True)]
SLOW = [
    ("Qwen3Next", GDN | EXPERTS | {"shared_expert_intermediate_size": 16}, False),
    ("Qwen3_5MoeText", GDN | EXPERTS | {"shared_expert_intermediate_size": 16}, False),
    ("OlmoHybrid", GDN, False),
    ("KimiLinear", KDA | {"linear_head_dim": 8, "linear_num_heads": 4}, False),
    ("BailingHybrid", KDA | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8}, False),
    ("NemotronH", NEMOTRON, False),
    *(
        (name, arguments | {biased: leaks}, leaks)
        for leaks in (False, True)
        for name, arguments, biased in [
            ("GraniteMoeHybrid", GRANITE, "mamba_proj_bias"),
            ("FalconH1", SSD | {"mamba_d_ssm": 64}, "mamba_proj_bias"),
            ("Bamba", SSD | {"attn_layer_indices": [1]}, "mamba_proj_bias"),
            ("Zamba2", ZAMBA, "add_bias_linear"),
            ("Lfm2", LFM | {"block_auto_adjust_ff_dim": False}, "conv_bias"),
            ("Lfm2Moe", LFM | EXPERTS | {"num_dense_layers": 1}, "conv_bias"),
            ("Lfm3", LFM | {"head_dim": 8}, "conv_bias"),
        ]
    ),
]
PROMPTS = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 17, 1, 9)]


def _model(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Random, with biases, and states that last and matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**COMMON | arguments)).eval()
    with torch.no_grad():
        for part, value in model.named_parameters():
            if part.endswith(("A_log", "dt_bias")):
                value.normal_(-1.2, 0.3)
            elif part.endswith("bias"):
                value.normal_(0, 0.3)
            elif value.ndim > 1:
                value.normal_(0, value[0].numel() ** -0.5)
        model.get_output_embeddings().weight.mul_(3)
    return model


def _sampled(model: nn.Module) -> list[list[Sampled]]:
    from odc_triton.jobs.rl.transformers_engine import TransformersEngine

    requests = [Request(ids=ids, seeds=[1, 2]) for ids in PROMPTS]
    options = SamplingOptions(temperature=0.8, max_new_tokens=16, end_tokens=(5, 6))
    return TransformersEngine(model).generate(requests, options)


def _assert_the_models(model: nn.Module, made: list[list[Sampled]]) -> None:
    for ids, group in zip(PROMPTS, made, strict=True):
        for sampled in group:
            want = log_probabilities(model, ids, sampled.ids, 0.8)
            torch.testing.assert_close(torch.tensor(sampled.logps), want, rtol=0, atol=1e-4)
    # The state matters: the first token reaches the last.
    first, *others = PROMPTS[2]
    one, other = (log_probabilities(model, [each, *others], [1] * 16, 0.8)[-8:] for each in (first, 63 - first))
    assert (one - other).abs().max() > 0.01


@RECURRENT
@pytest.mark.parametrize(
    ("name", "arguments", "leaks"), [*FAST, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_log_probabilities_are_those_of_the_prompt_alone(name: str, arguments: dict[str, Any], leaks: bool) -> None:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = _model(name, arguments)
    assert padding_leaks(model) == leaks
    _assert_the_models(model, _sampled(model))


def _sharded(rank: int, world: int, row: int) -> list[list[Sampled]]:
    from odc_triton import fully_shard

    return _sampled(fully_shard(_model(*FAST[row][:2])))


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(FAST)))
def test_of_a_sharded_model(row: int) -> None:
    for made in ranks.run(_sharded, 2, row):
        _assert_the_models(_model(*FAST[row][:2]), made)
