"""The table of models: small random models of transformers' families, and what each is expected to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.support.models import SIZES as BASE
from tests.support.tables import Table

FUSED = "fuses q, k, v"
COLUMNS = ("trains", "packs", "splits", "replaces layers", FUSED, "fused head", "LoRA", "simulate")

# Heads of 16 elements, which the fused projection supports.
SIZES: dict[str, Any] = BASE | {"hidden_size": 64}
_GPT2 = {
    "hidden_size": None,
    "intermediate_size": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "num_hidden_layers": None,
    "max_position_embeddings": None,
    "n_positions": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_GROUPS = {"n_group": 2, "topk_group": 1}
_WINDOW = {"sliding_window": 6}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

Refused = dict[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """`family`: as in its transformers classes; `sizes` changes SIZES, and None leaves one out; `fuses`: its attention
    layers have ours. `refused`: by column, a part of what the refusal says and the cell's words; else a cell is "yes".
    """

    name: str
    kind: str
    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    config: str = "Config"
    model: str = "ForCausalLM"
    fuses: bool = False
    refused: Refused = field(default_factory=dict)

    def refusal(self, column: str) -> tuple[str, str] | None:
        return self.refused.get(column, UNKNOWN if column == FUSED and not self.fuses else None)

    def config_of(self, **changes: Any) -> Any:
        import transformers

        sizes = SIZES | self.sizes | changes
        kept = {key: value for key, value in sizes.items() if value is not None}
        return getattr(transformers, self.family + self.config)(**kept)

    def build(self) -> nn.Module:
        """In training mode, on plain attention; large weights, so that biases, norms, windows and caps matter."""
        torch.manual_seed(0)
        model = self.class_of()._from_config(self.config_of(), attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # DeepSeek's routers choose by it
                buffer.uniform_()
        return model.train()

    def class_of(self) -> Any:
        import transformers

        return getattr(transformers, self.family + self.model)


UNKNOWN = ("of an unknown family", "no: its attention is of a family that has no fused layer")


def _unpacked(words: str, short: str, **others: tuple[str, str]) -> Refused:
    return {"packs": (words, f"no: {short}"), "splits": (words, "no: it does not pack"), **others}


_NO_PIECES = {"splits": ("is not told which documents are pieces", "no: its layers don't tell attention of pieces")}
_CAPPED = {"fused head": ("caps its logits by a tanh", "no: it caps its logits, which needs them")}
_BIAS = {"fused head": ("it has a bias", "no: its head has a bias")}
_NEVER = _unpacked("it never called the attention function", "it never calls the attention that it is given")
_MIXER = _unpacked("only 1 of its 2 layers called", "not all of its layers are attention")
_CHUNKS = _unpacked("passes neither position_ids nor cu_seq_lens_q", "its attention is not told where documents begin")
_STATE = {
    FUSED: ("RuntimeError: ", "no: it has no attention"),
    "LoRA": ("is incompatible with Mamba-based", "no: PEFT refuses it"),
}
_ROUTER = {"LoRA": ("'tuple' object has no attribute", "no: PEFT can't adapt its routers")}  # nor in plain torch

ROWS = [
    Row(name="Llama", fuses=True, kind="dense", family="Llama"),
    Row(name="Mistral", fuses=True, kind="dense, windows", family="Mistral", sizes=_WINDOW),
    Row(name="Ministral", kind="dense, windows", family="Ministral", sizes=_WINDOW | _BOTH | {"head_dim": 16}),
    Row(name="Qwen2", fuses=True, kind="dense", family="Qwen2"),
    Row(name="Qwen2, tied", fuses=True, kind="dense, tied", family="Qwen2", sizes={"tie_word_embeddings": True}),
    Row(
        name="Qwen2, windows",
        fuses=True,
        kind="dense, windows",
        family="Qwen2",
        sizes={"use_sliding_window": True, "max_window_layers": 1} | _WINDOW,
    ),
    Row(name="Qwen3", fuses=True, kind="dense", family="Qwen3", sizes={"head_dim": 16}),
    Row(name="Gemma", kind="dense, tied", family="Gemma", sizes={"head_dim": 16}),
    Row(
        name="Gemma2",
        kind="dense, tied, windows, softcaps",
        family="Gemma2",
        sizes=_WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
        refused=_CAPPED,
    ),
    Row(
        name="Gemma3, text",
        kind="dense, tied, windows",
        family="Gemma3",
        config="TextConfig",
        sizes=_WINDOW | _BOTH | {"head_dim": 16},
    ),
    Row(
        name="Gemma4, text",
        kind="dense",
        family="Gemma4",
        config="TextConfig",
        sizes=_WINDOW
        | _BOTH
        | {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "global_head_dim": 16, "head_dim": 16},
    ),
    Row(name="Phi", kind="dense", family="Phi", refused=_BIAS),
    Row(name="Phi3 (Phi-4)", kind="dense, windows", family="Phi3", sizes=_WINDOW),
    Row(name="OLMo", kind="dense", family="Olmo"),
    Row(name="OLMo2", kind="dense", family="Olmo2"),
    Row(name="OLMo3", kind="dense, windows", family="Olmo3", sizes=_WINDOW | _BOTH),
    Row(
        name="Granite",
        kind="dense",
        family="Granite",
        sizes={
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
        },
    ),
    Row(name="SmolLM3", kind="dense", family="SmolLM3", sizes={"no_rope_layers": [1, 0]}),
    Row(name="Cohere", kind="dense, tied", family="Cohere"),
    Row(name="Cohere2", kind="dense, tied, windows", family="Cohere2", sizes=_WINDOW | _BOTH | {"head_dim": 16}),
    Row(name="Glm4", kind="dense", family="Glm4", sizes={"head_dim": 16}),
    Row(name="StableLM", kind="dense", family="StableLm", sizes={"attention_dropout": 0.0}, refused=_NO_PIECES),
    Row(
        name="Starcoder2",
        kind="dense",
        family="Starcoder2",
        sizes={"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    ),
    Row(
        name="SeedOss",
        kind="dense",
        family="SeedOss",
        sizes={"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    Row(name="Exaone4", kind="dense, windows", family="Exaone4", sizes=_WINDOW | _BOTH),
    Row(name="Ernie4.5", kind="dense", family="Ernie4_5", sizes={"head_dim": 16}),
    Row(name="Nemotron", kind="dense", family="Nemotron", refused=_NO_PIECES),
    Row(name="GPT-2", kind="dense, tied", family="GPT2", model="LMHeadModel", sizes=_GPT2),
    Row(
        name="GPT-NeoX (Pythia)",
        kind="dense",
        family="GPTNeoX",
        sizes={"num_key_value_heads": None, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    Row(
        name="OPT",
        kind="dense, tied",
        family="OPT",
        sizes={
            "num_key_value_heads": None,
            "intermediate_size": None,
            "ffn_dim": 48,
            "word_embed_proj_dim": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    Row(
        name="BLOOM",
        kind="dense, tied",
        family="Bloom",
        sizes={
            "num_key_value_heads": None,
            "intermediate_size": None,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        refused=_NEVER,
    ),
    Row(
        name="Falcon",
        kind="dense",
        family="Falcon",
        sizes={
            "num_key_value_heads": None,
            "intermediate_size": None,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 48,
        },
        refused=_NEVER,
    ),
    Row(name="Mixtral", kind="mixture", family="Mixtral", sizes=_LOCAL_EXPERTS | _WINDOW),
    Row(
        name="Qwen2-MoE",
        kind="mixture",
        family="Qwen2Moe",
        sizes=_EXPERTS | {"shared_expert_intermediate_size": 24},
    ),
    Row(name="Qwen3-MoE", kind="mixture", family="Qwen3Moe", sizes=_EXPERTS | {"mlp_only_layers": [0], "head_dim": 16}),
    Row(
        name="gpt-oss",
        kind="mixture, windows, sinks",
        family="GptOss",
        sizes=_LOCAL_EXPERTS | _WINDOW | {"head_dim": 16},
    ),
    Row(
        name="DeepSeek-V2",
        kind="mixture",
        family="DeepseekV2",
        sizes=_LATENT | _ROUTED | {"num_key_value_heads": 4},
    ),
    Row(
        name="DeepSeek-V3",
        kind="mixture",
        family="DeepseekV3",
        sizes=_LATENT | _ROUTED | _GROUPS | {"num_key_value_heads": 4},
    ),
    Row(
        name="GLM-4.5 (Glm4Moe)",
        kind="mixture",
        family="Glm4Moe",
        sizes=_ROUTED | _GROUPS | {"head_dim": 16},
    ),
    Row(name="Granite-MoE", kind="mixture", family="GraniteMoe", sizes=_LOCAL_EXPERTS),
    Row(
        name="Llama4, text",
        kind="mixture, chunks",
        family="Llama4",
        config="TextConfig",
        sizes={"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 32, "head_dim": 16},
        refused=_CHUNKS | _ROUTER,
    ),
    Row(
        name="Qwen3-Next",
        kind="mixture, linear attention",
        family="Qwen3Next",
        sizes=_EXPERTS
        | {
            "head_dim": 16,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        refused=_MIXER,
    ),
    Row(
        name="LFM2",
        kind="dense, convolutions",
        family="Lfm2",
        sizes={"layer_types": ["conv", "full_attention"]},
        refused=_MIXER,
    ),
    Row(
        name="Mamba",
        kind="state space",
        family="Mamba",
        sizes={"num_key_value_heads": None, "num_attention_heads": None, "intermediate_size": None, "state_size": 4},
        refused=_NEVER | _STATE,
    ),
]
BY_NAME = {row.name: row for row in ROWS}


def _expected(row: str, column: str) -> str:
    refusal = BY_NAME[row].refusal(column)
    return "yes" if refusal is None else refusal[1]


MODELS = Table(name="models", columns=COLUMNS, rows=tuple((row.name, row.kind) for row in ROWS), expected=_expected)
