"""The registry of small causal LMs: one entry for each of transformers' families, and what it is expected to do.

`causal_lm` builds them; `tests/support/models.py` has their microbatches, and `docs/models.md` is a table of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

FUSED = "fuses q, k, v"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"hidden_size": 64}  # heads of 16 elements, which the fused projection supports

Refused = dict[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """`of`: as in its transformers classes, by default its key in FAMILIES; `sizes` changes SIZES, and None leaves one
    out. `title`, by default the key, and `kind`: of its row in docs/models.md; `fuses`: its attention layers have ours.
    `refused`: by column, a part of what the refusal says and the cell's words; else a cell is "yes".
    """

    kind: str
    title: str | None = None
    of: str | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    config: str = "Config"
    model: str = "ForCausalLM"
    fuses: bool = False
    refused: Refused = field(default_factory=dict)

    def refusal(self, column: str) -> tuple[str, str] | None:
        return self.refused.get(column, UNKNOWN if column == FUSED and not self.fuses else None)


UNKNOWN = ("of an unknown family", "no: no fused layer exists for its attention")


def _unpacked(words: str, short: str, **others: tuple[str, str]) -> Refused:
    late = dict.fromkeys(("splits", "simulate"), (words, "no: it can't be packed"))
    return {"packs": (words, f"no: {short}"), **late, **others}


_CAPPED = {"fused head": ("caps its logits by a tanh", "no: it caps its logits, so the full logits are needed")}
_BIAS = {"fused head": ("it has a bias", "no: its head has a bias, which the fused head does not add")}
_NEVER = _unpacked("it never called the configured attention function", "transformers can't replace its attention")
_BLOCKS = _unpacked(
    "uses `block_indices`, which a pack drops", "its indexer chooses blocks of a pack, not of a document"
)
_NO_AUTO = {
    "simulate": ("for this kind of AutoModel", "no: transformers' AutoModelForCausalLM does not know its config")
}
_INDEX = {"splits": ("chooses keys by an indexer", "no: its indexer does not see the keys of other ranks")}
_CHUNKS = _unpacked(
    "passes neither position_ids nor cu_seq_lens_q", "transformers does not tell its attention where documents begin"
)
_STATE = _unpacked(
    "computes mamba_selective_scan, whose state", "its state can't be kept apart between the documents of a pack"
) | {
    FUSED: ("RuntimeError: ", "no: it has no attention"),
    "LoRA": ("is incompatible with Mamba-based", "no: PEFT refuses its layers"),
}
_ROUTER = {"LoRA": ("'tuple' object has no attribute", "no: PEFT can't adapt its routers")}  # nor in plain torch

_HEAD = {"head_dim": 16}
_ALL_HEADS = {"num_key_value_heads": None}
_WINDOW = {"sliding_window": 6}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_WINDOWS = _WINDOW | _BOTH | _HEAD
_PER_LAYER = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
_NO_WIDTH = _ALL_HEADS | {"intermediate_size": None}
_GRANITE = {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
# Mixtures of experts. Five experts don't divide evenly by two ranks; a layer without experts where the family has some.
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 24}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_MLA = _LATENT | _ROUTED | {"num_key_value_heads": 4}
_GROUPS = {"n_group": 2, "topk_group": 1}
_LITE = {key: value for key, value in (_LATENT | _ROUTED).items() if key != "first_k_dense_replace"} | {
    "num_key_value_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
}
# Keys chosen by an indexer: fewer than documents have, from so many heads that no two keys score alike.
_INDEXED = _LITE | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 16}
_SHARED_INDEX = _INDEXED | {"indexer_types": ["full", "shared"]}
_SPARSE_BLOCKS = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2} | {
    "layer_types": ["full_attention", "minimax_m3_sparse"]
}


def _without_dropout(*names: str) -> dict[str, float]:
    return dict.fromkeys((f"{name}_dropout" if name else "dropout" for name in names), 0.0)


def _text(kind: str, title: str, **more: Any) -> Family:
    return Family(kind=kind, title=f"{title}, text", config="TextConfig", **more)


FAMILIES = {
    "Llama": Family(kind="dense", fuses=True),
    "Mistral": Family(kind="dense, windows", fuses=True, sizes=_WINDOW),
    "Ministral": Family(kind="dense, windows", sizes=_WINDOW | _BOTH | _HEAD),
    "Ministral3": Family(kind="dense", sizes=_HEAD),
    "Qwen2": Family(kind="dense", fuses=True),
    "Qwen2, tied": Family(kind="dense, tied", of="Qwen2", fuses=True, sizes={"tie_word_embeddings": True}),
    "Qwen2, windows": Family(
        kind="dense, windows",
        of="Qwen2",
        fuses=True,
        sizes={"use_sliding_window": True, "max_window_layers": 1} | _WINDOW,
    ),
    "Qwen3": Family(kind="dense", fuses=True, sizes=_HEAD),
    "Gemma": Family(kind="dense, tied", sizes=_HEAD),
    "Gemma2": Family(
        kind="dense, tied, windows, softcaps",
        sizes=_WINDOW | _HEAD | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
        refused=_CAPPED,
    ),
    "Gemma3": _text("dense, tied, windows", "Gemma3", sizes=_WINDOWS),
    "Gemma4": _text("dense", "Gemma4", sizes=_WINDOWS | _PER_LAYER | {"global_head_dim": 16}),
    "Gemma4Unified": _text("dense, tied, windows", "Gemma4 unified", sizes=_WINDOWS | {"global_head_dim": 24}),
    "Gemma3n": _text(
        "dense, tied, windows, shared keys",
        "Gemma3n",
        sizes=_WINDOWS
        | _PER_LAYER
        | {"layer_types": 2 * _BOTH["layer_types"], "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
        refused=_CAPPED,
    ),
    "Phi": Family(kind="dense", refused=_BIAS),
    "Phi3": Family(kind="dense, windows", title="Phi3 (Phi-4)", sizes=_WINDOW),
    "Olmo": Family(kind="dense", title="OLMo"),
    "Olmo2": Family(kind="dense", title="OLMo2"),
    "Olmo3": Family(kind="dense, windows", title="OLMo3", sizes=_WINDOW | _BOTH),
    "Granite": Family(kind="dense", sizes=_GRANITE),
    "SmolLM3": Family(kind="dense", sizes={"no_rope_layers": [1, 0]}),
    "Cohere": Family(kind="dense, tied"),
    "Cohere2": Family(kind="dense, tied, windows", sizes=_WINDOWS),
    "Glm4": Family(kind="dense", sizes=_HEAD),
    "StableLm": Family(kind="dense", title="StableLM", sizes=_without_dropout("attention")),
    "Starcoder2": Family(kind="dense", sizes=_without_dropout("residual", "embedding", "attention")),
    "SeedOss": Family(kind="dense", sizes=_HEAD | _without_dropout("attention", "residual")),
    "Exaone4": Family(kind="dense, windows", sizes=_WINDOW | _BOTH),
    "Ernie4_5": Family(kind="dense", title="Ernie4.5", sizes=_HEAD),
    "Nemotron": Family(kind="dense"),
    "Apertus": Family(kind="dense"),
    "Cwm": Family(kind="dense, windows", title="CWM", sizes=_WINDOWS),
    "GPT2": Family(
        kind="dense, tied",
        title="GPT-2",
        model="LMHeadModel",
        sizes=_NO_WIDTH | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "GPTNeoX": Family(
        kind="dense", title="GPT-NeoX (Pythia)", sizes=_ALL_HEADS | _without_dropout("hidden", "attention")
    ),
    "OPT": Family(
        kind="dense, tied",
        sizes=_NO_WIDTH | {"ffn_dim": 48, "word_embed_proj_dim": 64} | _without_dropout("", "attention"),
    ),
    "Bloom": Family(
        kind="dense, tied",
        title="BLOOM",
        sizes=_NO_WIDTH | {"n_layer": 2, "n_head": 4} | _without_dropout("hidden", "attention"),
        refused=_NEVER,
    ),
    "Falcon": Family(
        kind="dense",
        sizes=_NO_WIDTH | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
        refused=_NEVER,
    ),
    "Mixtral": Family(kind="mixture", sizes=_LOCAL_EXPERTS | _WINDOW),
    "Qwen2Moe": Family(kind="mixture", title="Qwen2-MoE", sizes=_SHARED_EXPERT),
    "Qwen3Moe": Family(kind="mixture", title="Qwen3-MoE", sizes=_EXPERTS | _HEAD | {"mlp_only_layers": [0]}),
    "GptOss": Family(kind="mixture, windows, sinks", title="gpt-oss", sizes=_LOCAL_EXPERTS | _WINDOW | _HEAD),
    "DeepseekV2": Family(kind="mixture", title="DeepSeek-V2", sizes=_MLA),
    "DeepseekV3": Family(kind="mixture", title="DeepSeek-V3", sizes=_MLA | _GROUPS),
    "Glm4Moe": Family(kind="mixture", title="GLM-4.5 (Glm4Moe)", sizes=_ROUTED | _GROUPS | _HEAD),
    "Glm4MoeLite": Family(kind="mixture", title="GLM-4.7-Flash (Glm4MoeLite)", sizes=_LITE | _GROUPS),
    "DeepseekV32": Family(kind="mixture, indexer", title="DeepSeek-V3.2", sizes=_INDEXED | _GROUPS, refused=_INDEX),
    "GlmMoeDsa": Family(
        kind="mixture, indexer", title="GLM-5 (GlmMoeDsa)", sizes=_SHARED_INDEX | _GROUPS, refused=_INDEX
    ),
    "HYV4": Family(kind="mixture, indexer, sinks", title="HY-V4", sizes=_SHARED_INDEX | _GROUPS, refused=_INDEX),
    "MiniMaxM2": Family(kind="mixture", title="MiniMax-M2", sizes=_LOCAL_EXPERTS | _HEAD),
    "MiniMaxM3VL": _text(
        "mixture, indexer of blocks",
        "MiniMax-M3",
        sizes=_LOCAL_EXPERTS
        | _HEAD
        | _SPARSE_BLOCKS
        | {"dense_intermediate_size": 48, "shared_intermediate_size": 24, "rotary_dim": 8}
        | {"mlp_layer_types": ["dense", "sparse"]},
        refused=_BLOCKS,
    ),
    "Mistral4": Family(kind="mixture", title="Mistral Small 4 (Mistral4)", sizes=_MLA | _GROUPS, refused=_NO_AUTO),
    "Ernie4_5_Moe": Family(
        kind="mixture, tied",
        title="Ernie4.5-MoE",
        sizes={"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    ),
    "HunYuanMoEV1": Family(kind="mixture", title="Hunyuan-MoE", sizes=_HEAD | {"num_experts": 5, "moe_topk": 2}),
    "Afmoe": Family(
        kind="mixture, windows",
        title="AFMoE (Trinity)",
        sizes=_EXPERTS | _WINDOWS | {"num_dense_layers": 1, "num_shared_experts": 1},
    ),
    "Laguna": Family(
        kind="mixture, windows", sizes=_SHARED_EXPERT | _WINDOWS | {"mlp_layer_types": ["dense", "sparse"]}
    ),
    "SolarOpen": Family(
        kind="mixture",
        title="Solar-Open",
        sizes=_ROUTED | _GROUPS | _HEAD | {"first_k_dense_replace": None, "intermediate_size": None},
    ),
    "GraniteMoe": Family(kind="mixture", title="Granite-MoE", sizes=_LOCAL_EXPERTS),
    "Llama4": _text(
        "mixture, chunks",
        "Llama4",
        sizes=_HEAD | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 32},
        refused=_CHUNKS | _ROUTER,
    ),
    "Mamba": Family(
        kind="state space",
        sizes=_ALL_HEADS | {"num_attention_heads": None, "intermediate_size": None, "state_size": 4},
        refused=_STATE,
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    """transformers' config of a family; `changes` are of its sizes."""
    import transformers

    family = FAMILIES[name]
    kept = {key: value for key, value in (SIZES | family.sizes | changes).items() if value is not None}
    return getattr(transformers, (family.of or name) + family.config)(**kept)


def class_of(name: str) -> type[nn.Module]:
    import transformers

    return getattr(transformers, (FAMILIES[name].of or name) + FAMILIES[name].model)


def causal_lm(name: str, *, attention: str | None = "eager", spread: float = 0.0, **changes: Any) -> nn.Module:
    """The model, in training mode. `attention`: transformers' choice if None; `spread`: of what is added to weights, so
    that biases, norms, windows and caps matter.
    """
    model = class_of(name)(config_of(name, **changes, attn_implementation=attention))
    with torch.no_grad():
        for parameter in model.parameters() if spread else ():
            parameter.add_(torch.randn_like(parameter) * spread)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):  # DeepSeek's routers choose by it; zeros would not show its loss
            buffer.uniform_()
    return model.train()


def make_new_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """StableLM's attention gets another tensor of the same positions, as from a model that computes them itself."""
    from transformers.models.stablelm.modeling_stablelm import StableLmAttention

    forward = StableLmAttention.forward

    def other(self: nn.Module, *args: Any, position_ids: torch.Tensor, **given: Any) -> Any:
        return forward(self, *args, position_ids=position_ids.clone(), **given)

    monkeypatch.setattr(StableLmAttention, "forward", other)


def wide(name: str, attention: str | None = None) -> nn.Module:
    """With heads that the fused projection supports, and weights large enough to matter; always the same."""
    torch.manual_seed(0)
    return causal_lm(name, attention=attention, spread=0.1, **WIDE)


def with_lora(
    model: nn.Module, targets: Sequence[str] = ("q_proj", "v_proj", "up_proj"), seed: int = 1, **more: object
) -> nn.Module:
    """PEFT's adapters, of which B is not 0 either: else A would have no gradient at first. `more`: LoraConfig's."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    usual = {"r": 4, "lora_alpha": 16, "target_modules": list(targets), "init_lora_weights": False}
    options = LoraConfig(**usual | more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses an attribute that transformers has renamed
        return get_peft_model(model, options)
