"""Models as the simulator needs them, from a transformers config: sizes of their units, work and memory per token.

Bytes on the fullest GPU are `memory_plan`'s sums, computed from a model's sizes alone, with nodes: bf16 compute, fp32
masters, gradients and AdamW states. Tests compare the two. Left out, less than 1%: norms, biases, alignment, rows that
don't divide evenly, but for experts.

[Note: rows of experts] The experts of a block are one tensor per matrix, whose rows, which are split over ranks, are
whole experts. So 8 experts over 16 GPUs lie on 8 of them: the fullest has 1/8, not 1/16. It also serves that much more
to its peers, and FSDP2, which pads the others' shards to its size, sends as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..balance.cost import CostModel
from ..balance.decoder import Block, Decoder, expert_count
from ..base.files import read_json_object
from ..comm.layout import rows_per_rank
from ..sharding.peaks import (
    decoder_bytes_per_token,
    fsdp2_whole_gradient_bytes,
    gathered_bytes,
    whole_gradient_bytes,
)

_QWEN = {"hidden_act": "silu", "model_type": "qwen2"}
_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)
# As published.
_SIZES = {
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": (3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": (5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": (5120, 64, 40, 8, 27648, 152064, False),
    "llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256, False),
}
_MIXTRAL = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
_QWEN3 = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048}
_OSS = {"model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 2880}
_OSS |= {"head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "num_experts_per_tok": 4}
_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168, "intermediate_size": 18432}
_V3 |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3 |= {"moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8}
# Mixtures of experts, with the attributes that tell their sizes.
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _MIXTRAL
    | {"model_type": "mixtral", "intermediate_size": 14336, "vocab_size": 32000}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": _QWEN3
    | {"model_type": "qwen3_moe", "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
    "gpt-oss-20b": _OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "deepseek-v3": _V3 | {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "vocab_size": 129280},
}
MODELS = (*_SIZES, *_MIXTURES)
# What a mixture's config must say, by family: without it, `Decoder.of` would take another family's default.
_TOLD = {
    "mixtral": ("num_experts_per_tok", "intermediate_size"),
    "qwen3_moe": ("num_experts_per_tok", "intermediate_size", "moe_intermediate_size"),
    "gpt_oss": ("num_experts_per_tok", "intermediate_size", "head_dim"),
    "deepseek_v3": (
        *("num_experts_per_tok", "intermediate_size", "moe_intermediate_size", "n_shared_experts", "kv_lora_rank"),
        "first_k_dense_replace",
    ),
}
# Dense families whose MLPs have two matrices; in the others they are gated and have three.
_TWO_MATRICES = ("gpt_neox", "nemotron", "phi", "starcoder2")
# Sizes under other names than `Decoder.of` reads, which would take defaults in their place.
_OTHER_NAMES = ("bloom", "falcon", "gpt2", "mpt", "opt")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_GENERATES = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Its `blocks`, and the root's parameters (embedding, last norm, head).

    `cost` is in FLOPs of forward and backward without recomputation. `activation_bytes`: per token, bf16, with and
    without gradient checkpointing, logits not included; None for an architecture that `footprint` doesn't know.
    """

    name: str
    blocks: tuple[Block, ...]
    root_parameters: int
    largest_parameter: int
    cost: CostModel
    activation_bytes: int | None
    activation_bytes_checkpointed: int | None
    logits_bytes: int
    """Per token, in bf16, and their log-probabilities in fp32: a fused head and loss never compute them."""
    kv_width: int = 0
    """Elements of a token's keys and values in one block, all heads."""

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks) + self.root_parameters

    @property
    def active_parameters(self) -> int:
        """Those that work on one token: of the experts of a block, the chosen ones."""
        return sum(block.active for block in self.blocks) + self.root_parameters

    def owned(self, shards: int, replicas: int = 1) -> float:
        """Parameters of the fullest GPU, where each of `replicas` copies lies in `shards`; [Note: rows of experts]."""
        experts = sum(
            rows_per_rank(rows_per_rank(block.experts, shards), replicas) * block.expert for block in self.blocks
        )
        dense = sum(block.dense for block in self.blocks) + self.root_parameters
        return experts + dense / (shards * replicas)

    def sent(self, shards: int) -> list[int]:
        """Per block, `shards` times what the fullest of them holds: a transfer of evenly split rows of as many
        parameters takes as long; [Note: rows of experts].
        """
        return [b.dense + shards * rows_per_rank(b.experts, shards) * b.expert for b in self.blocks]

    @classmethod
    def from_config(cls, config: Any, *, name: str) -> Model:
        """A decoder of attention and MLPs. Norms and biases are left out of the sizes (less than 0.1%).

        Raises what `CostModel.from_config` raises, and ValueError for a mixture of experts of an unknown family or
        whose config leaves sizes out, and for a model of other layers.
        """
        mixed = bool(expert_count(config))
        if mixed:
            _check_mixture(config, name)
        _check_layers(config, name)
        gated = getattr(config, "model_type", None) not in _TWO_MATRICES
        cost, decoder = (kind(config, gated_mlp=gated) for kind in (CostModel.from_config, Decoder.of))
        table = decoder.table
        logits = config.vocab_size * (2 + 4)
        known = getattr(config, "hidden_act", None) == "silu" and not mixed
        kept = [
            decoder_bytes_per_token(config, itemsize=2, gradient_checkpointing=checkpointing) - logits
            if known
            else None
            for checkpointing in (False, True)
        ]
        return cls(
            name=name,
            blocks=decoder.blocks,
            root_parameters=table if getattr(config, "tie_word_embeddings", False) else 2 * table,
            largest_parameter=table,
            cost=cost,
            activation_bytes=kept[0],
            activation_bytes_checkpointed=kept[1],
            kv_width=decoder.kv_heads * (decoder.key_width + decoder.value_width),
            logits_bytes=logits,
        )

    @classmethod
    def find(cls, name: str) -> Model:
        """One of `MODELS`, or a config.json, or a folder that holds one.

        Raises ValueError for a name that is none of these, and for a file that is not a decoder's config.
        """
        if name.lower() in _SIZES:
            sizes = dict(zip(_FIELDS, _SIZES[name.lower()], strict=True))
            return cls.from_config(SimpleNamespace(**sizes, **_QWEN), name=name.lower())
        if name.lower() in _MIXTURES:
            return cls.from_config(SimpleNamespace(**_MIXTURES[name.lower()]), name=name.lower())
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"model {name!r} is neither known nor a file: give one of {', '.join(MODELS)}, or the path of a "
                "transformers config.json"
            )
        content = read_json_object(path, "give a transformers config.json")
        kinds = content.get("architectures") or []
        if kinds and not any(kind.endswith(_GENERATES) for kind in kinds):
            raise ValueError(f"{path} describes a {', '.join(kinds)}, not a causal LM: only decoders can be simulated")
        try:
            decoder = SimpleNamespace(**content.get("text_config", content))
            return cls.from_config(decoder, name=path.parent.name or name)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} can't be simulated: {error}") from error


def _check_mixture(config: Any, name: str) -> None:
    family = getattr(config, "model_type", None)
    if family not in _TOLD:
        raise ValueError(
            f"model {name!r} is a mixture of experts of the family {family!r}, whose layers are not known here: give "
            f"one of {', '.join(_TOLD)}"
        )
    missing = [each for each in _TOLD[family] if getattr(config, each, None) is None]
    if missing:
        raise ValueError(
            f"model {name!r} is a {family}, and its config leaves out {', '.join(missing)}: add what the model has"
        )


def _check_layers(config: Any, name: str) -> None:
    family = getattr(config, "model_type", None)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION))
    if others:
        raise ValueError(f"model {name!r} has layers that can't be simulated: {', '.join(others)}")
    if getattr(config, "hidden_size_per_layer_input", None):
        raise ValueError(
            f"model {name!r} has an embedding for each layer (hidden_size_per_layer_input), which can't be simulated"
        )
    if family in _OTHER_NAMES:
        raise ValueError(
            f"model {name!r} is of the family {family!r}, whose config calls its sizes by names that are not known here"
        )


_COMPUTE, _FULL = 2, 4  # bytes per element
_STATES = 2 * _FULL


def state_bytes(model: Model, schedule: str, *, shards: int, ranks: int) -> int:
    """Per GPU, what is kept between minibatches and the peak within one, without activations.

    `shards`: GPUs that together hold one copy of the parameters (all `ranks`, unless each node holds a copy). Even then
    ODC splits masters and optimizer states over all `ranks`; FSDP2 keeps them with the shards.
    """
    root, table = model.root_parameters, model.largest_parameter
    sizes = [block.parameters for block in model.blocks]
    blocks = [_COMPUTE * each for each in sizes]
    gathered = gathered_bytes(_COMPUTE * root, blocks)
    if schedule == "odc":
        whole = whole_gradient_bytes(_COMPUTE * root, blocks, tied=_COMPUTE * table if root == table else 0)
        kept = (_COMPUTE + _FULL) * model.owned(shards) + (_FULL + _STATES) * model.owned(shards, ranks // shards)
        return math.ceil(kept) + gathered + whole
    resharded = schedule == "fsdp"
    whole = fsdp2_whole_gradient_bytes(
        (_COMPUTE * root, _FULL * root),
        [(_COMPUTE * each, _FULL * each) for each in sizes],
        late_root=_COMPUTE * table,
        resharded=resharded,
        gathered_bytes=gathered,
        shard_bytes=int(_FULL * model.owned(shards)),
    )
    kept = math.ceil((2 * _FULL + _STATES) * model.owned(shards))
    return kept + (gathered if resharded else _COMPUTE * model.parameters) + whole


def peak_bytes(
    model: Model, schedule: str, *, shards: int, ranks: int, tokens: int, checkpointing: bool, fused_head: bool
) -> int | None:
    """With the activations of a microbatch of `tokens` tokens; None if a token's are not known."""
    each = model.activation_bytes_checkpointed if checkpointing else model.activation_bytes
    if each is None:
        return None
    each += 0 if fused_head else model.logits_bytes
    return state_bytes(model, schedule, shards=shards, ranks=ranks) + each * tokens
