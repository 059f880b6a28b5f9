"""Small hybrid models, whose states matter, rules that compute in fp64, and the gradients of samples one by one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import odc_triton.sequence.enable  # noqa: F401 before `rules_in` looks for our modules
from tests.support import families
from tests.support.gradients import gradients_of
from tests.support.versions import is_older
from tests.support.vision import TOKENS, alone

SIZES = {name: size for name, size in families.SIZES.items() if name != "num_hidden_layers"}
SIZES |= {"max_position_embeddings": 512}
_HEAD = {"head_dim": 16}
_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
_DELTA = _LAYERS | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_EXPERT = _EXPERTS | _HEAD | {"shared_expert_intermediate_size": 24}
_LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
_KDA = _LAYERS | _LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_local_experts": 4}
_KDA |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16}
_BAILING = {"head_dim": 8, "n_group": 2, "topk_group": 1, "kda_lower_bound": -0.2}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_chunk_size": 16}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16} | _HEAD
_NEMOTRON |= {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]}
_NEMOTRON_MOE = {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "n_routed_experts": 4}
_NEMOTRON_MOE |= {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
_GRANITE = {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "num_local_experts": 4}
_GRANITE |= {"num_experts_per_tok": 2, "shared_intermediate_size": 24}
_ZAMBA = {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "n_mamba_heads": 8}
_ZAMBA |= {"mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 16, "adapter_rank": 4, "num_key_value_heads": 4}
_CONV = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_bias": True}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True, "rope_theta": 1e4}
_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48}
_TOWER |= {"out_hidden_size": 32, "num_position_embeddings": 64}

GDN, KDA, MAMBA2, CONV = "gated delta rule", "Kimi delta attention", "Mamba-2", "short convolution"


@dataclass(frozen=True)
class Hybrid:
    """`of`: as in its transformers classes; `sizes` changes SIZES; `tower`: it sees images; `mixture`: of experts, so
    the shapes of its products follow the routing; `since`: the first transformers that tells its layers of packs.
    """

    of: str
    rule: str
    sizes: dict[str, Any]
    tower: bool = False
    mixture: bool = False
    since: str = "5.17"


HYBRIDS = {
    "qwen3_next": Hybrid("Qwen3Next", GDN, _DELTA | _SHARED_EXPERT, mixture=True),
    "qwen3_5": Hybrid("Qwen3_5", GDN, _DELTA | _HEAD),
    "qwen3_5, images": Hybrid("Qwen3_5", GDN, _DELTA | _HEAD | {"rope_parameters": _ROPE}, tower=True),
    "qwen3_5_moe": Hybrid("Qwen3_5Moe", GDN, _DELTA | _SHARED_EXPERT, mixture=True),
    "olmo_hybrid": Hybrid("OlmoHybrid", GDN, _DELTA),
    "kimi_linear": Hybrid("KimiLinear", KDA, _KDA | {"linear_head_dim": 8, "linear_num_heads": 4}, mixture=True),
    "bailing_hybrid": Hybrid("BailingHybrid", KDA, _KDA | _BAILING, mixture=True),
    "nemotron_h": Hybrid("NemotronH", MAMBA2, _NEMOTRON),
    "nemotron_h, experts": Hybrid("NemotronH", MAMBA2, _NEMOTRON | _NEMOTRON_MOE, mixture=True),
    "granitemoehybrid": Hybrid("GraniteMoeHybrid", MAMBA2, _MAMBA | _GRANITE, mixture=True),
    # Attention and a state in each layer.
    "falcon_h1": Hybrid("FalconH1", MAMBA2, _MAMBA | _HEAD | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "bamba": Hybrid("Bamba", MAMBA2, _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "zamba2": Hybrid("Zamba2", MAMBA2, _ZAMBA),  # one block attends in two layers
    "lfm2": Hybrid("Lfm2", CONV, _CONV, since="5.23"),
    "lfm2_moe": Hybrid("Lfm2Moe", CONV, _CONV | _EXPERTS | {"num_dense_layers": 1}, mixture=True, since="5.23"),
    "lfm3": Hybrid("Lfm3", CONV, _CONV | _HEAD | {"sliding_window": 8}),
}
_HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# Of config.json, changes to that of tests/support/sft_case.py.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5_text", **_DELTA, **_HEADS},
    "nemotron_h": {"model_type": "nemotron_h", **_NEMOTRON, **_HEADS, "num_hidden_layers": 4},
}
FAST = ("qwen3_5", "kimi_linear", "nemotron_h", "lfm2")  # one of each rule


def lacking(name: str) -> str:
    """What keeps the family from being tested on this transformers, or nothing."""
    import transformers

    family = HYBRIDS[name]
    if not hasattr(transformers, f"{family.of}Config"):
        return f"transformers {transformers.__version__} has no {family.of}"
    return f"{family.of} needs transformers {family.since}" if is_older(family.since) else ""


def hybrid(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """The model, in training mode, always the same. The test is skipped if this transformers lacks the family."""
    import transformers

    if reason := lacking(name):
        pytest.skip(reason)
    family = HYBRIDS[name]
    torch.manual_seed(seed)
    sizes = SIZES | family.sizes | changes
    if family.tower:
        config = getattr(transformers, f"{family.of}Config")(text_config=sizes, vision_config=_TOWER, **TOKENS)
        model = getattr(transformers, f"{family.of}ForConditionalGeneration")(config)
    else:
        text = "TextConfig" if hasattr(transformers, f"{family.of}TextConfig") else "Config"
        model = getattr(transformers, f"{family.of}ForCausalLM")(getattr(transformers, family.of + text)(**sizes))
    model.set_attn_implementation("eager")
    if family.mixture:
        model.set_experts_implementation("eager")  # others take no fp64
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _randomise(key.rsplit(".", 1)[-1], parameter)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_()
    return model.to(dtype).train()


def _randomise(name: str, parameter: Tensor) -> None:
    """So that a state keeps most of what came 20 tokens before, and every weight, bias and norm matters."""
    if name == "A_log":
        parameter.uniform_(-4.0, -2.0)
    elif name == "dt_bias":
        parameter.uniform_(-1.0, 0.0)
    elif parameter.ndim == 1:
        parameter.add_(0.2 * torch.randn_like(parameter))
    else:
        parameter.normal_(std=parameter.shape[-1] ** -0.5)


@contextlib.contextmanager
def rules_in(dtype: torch.dtype) -> Iterator[None]:
    """Rules, routers and norms, of transformers' models and ours, that compute in fp32 compute in `dtype`, forwards and
    backwards: there torch.float32 and `.float()` mean `dtype`. Enter it after `hybrid`, which imports the model's
    module, and before `enable_packing`, which may copy that module's names.
    """
    own, stand_in = Tensor.float, ModuleType("torch")
    vars(stand_in).update(vars(torch), float32=dtype, float=dtype)
    places = ("transformers.models.", "odc_triton.recurrent", "odc_triton.packs", "odc_triton.sequence")
    changed = [
        each for name, each in [*sys.modules.items()] if name.startswith(places) and vars(each).get("torch") is torch
    ]
    for module in changed:
        module.torch = stand_in
    Tensor.float = lambda self, **given: self.to(dtype, **given)
    try:
        yield
    finally:
        Tensor.float = own
        for module in changed:
            module.torch = torch


def tokens(count: int, seed: int) -> list[int]:
    """None of them stands for an image."""
    return torch.randint(3, 56, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Found:
    loss: float
    logits: list[Tensor]  # of each sample
    gradients: dict[str, Tensor]


def one_by_one(model: nn.Module, samples: Sequence[dict[str, Any]]) -> Found:
    """By plain transformers: the losses' sum, in the logits' dtype, and its gradients. Samples are as a data set's."""
    total, logits = 0.0, []
    model.zero_grad()
    for sample in samples:
        logits.append(alone(model, sample))
        loss = F.cross_entropy(logits[-1][:-1], torch.tensor(sample["labels"])[1:], reduction="sum")
        loss.backward()
        total += loss.item()
    return Found(total, [each.detach() for each in logits], gradients_of(model))
