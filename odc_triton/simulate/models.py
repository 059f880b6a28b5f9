"""Models as the simulator needs them: sizes of their units, work and memory per token, of transformers' model on meta.

Bytes on the fullest GPU are `memory_plan`'s sums, with nodes: bf16 compute, fp32 masters, gradients and AdamW states.
Tests compare the two. Left out, less than 1%: alignment, and rows that don't divide evenly, but for experts.

[Note: rows of experts] The experts of a block are one tensor per matrix, whose rows, which are split over ranks, are
whole experts. So 8 experts over 16 GPUs lie on 8 of them: the fullest has 1/8, not 1/16. It also serves that much more
to its peers, and FSDP2, which pads the others' shards to its size, sends as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..balance.cost import CostModel
from ..balance.decoder import Block, Decoder, expert_count
from ..base.errors import in_a_line
from ..base.files import read_json_object
from ..comm.layout import find_units, rows_per_rank
from ..sharding.peaks import (
    activation_bytes_per_token,
    fsdp2_whole_gradient_bytes,
    gathered_bytes,
    whole_gradient_bytes,
)

if TYPE_CHECKING:
    from torch import nn


def _dense(family: str, h: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": family,
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


_OSS = _dense("gpt_oss", 2880, 24, 64, 8, 2880, 201088, False) | {"head_dim": 64, "num_experts_per_tok": 4}
# Configs as published; what they leave out is the default of their family.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _dense("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": _dense("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": _dense("qwen2", 2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": _dense("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": _dense("qwen2", 5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": _dense("qwen2", 5120, 64, 40, 8, 27648, 152064, False),
    "llama-3.1-8b": _dense("llama", 4096, 32, 32, 8, 14336, 128256, False),
    "mixtral-8x7b": _dense("mixtral", 4096, 32, 32, 8, 14336, 32000, False)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": _dense("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, False)
    | {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    "gpt-oss-20b": _OSS | {"num_local_experts": 32},
    "gpt-oss-120b": _OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "deepseek-v3": _dense("deepseek_v3", 7168, 61, 128, 128, 18432, 129280, False)
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 3},
}
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_GENERATES = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Its `blocks`, and the root's parameters (embedding, last norm, head), of which `tied` are used twice.

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
    tied: int = 0

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
    def of(cls, model: nn.Module, *, name: str) -> Model:
        """A causal LM of transformers, which may be on the meta device. FLOPs are those of `CostModel.from_config`, by
        the weights that the model has; attention only in layers that have it.
        """
        from ..sharding.collect import find_parameters, spec_of

        config, units = model.config, find_units(model)
        specs = [spec_of(entry, None) for entry in find_parameters(model, units, set())]
        experts, chosen = expert_count(config), getattr(config, "num_experts_per_tok", None) or 1
        blocks = []
        for unit in units:
            own = [spec for spec in specs if spec.unit == unit]
            mixed = [
                math.prod(spec.shape)
                for spec in own
                if experts and spec.shape[0] == experts and (len(spec.shape) > 2 or ".experts." in spec.name)
            ]
            dense = sum(math.prod(spec.shape) for spec in own) - sum(mixed)
            some = {"expert": sum(mixed) // experts, "experts": experts, "chosen": chosen} if mixed else {}
            blocks.append(Block(dense=dense, **some))
        root = [spec for spec in specs if spec.unit not in units]
        kinds = getattr(config, "layer_types", None) or [_ATTENTION[0]] * len(blocks)
        decoder = Decoder.of(config) if getattr(config, "num_attention_heads", None) else None
        widths = 0 if decoder is None else decoder.key_width + decoder.value_width
        attention = 0 if decoder is None else decoder.heads * widths * sum(kind in _ATTENTION for kind in kinds)
        table, logits = config.hidden_size * config.vocab_size, config.vocab_size * (2 + 4)
        kept = [
            activation_bytes_per_token(model, itemsize=2, gradient_checkpointing=checkpointing)
            for checkpointing in (False, True)
        ]
        plain, checkpointed = (None if each is None else each - logits for each in kept)
        return cls(
            name=name,
            blocks=tuple(blocks),
            root_parameters=sum(math.prod(spec.shape) for spec in root),
            largest_parameter=max(math.prod(spec.shape) for spec in root),
            cost=CostModel(quadratic=3 * attention, linear=6 * (sum(block.active for block in blocks) + table)),
            activation_bytes=plain,
            activation_bytes_checkpointed=checkpointed,
            kv_width=0 if decoder is None else decoder.kv_heads * widths,
            logits_bytes=logits,
            tied=sum(math.prod(spec.shape) for spec in root if len(spec.names) > 1),
        )

    @classmethod
    def find(cls, name: str) -> Model:
        """One of `MODELS`, or a config.json, or a folder that holds one: of a model of several parts its text decoder.

        Raises ValueError for a name that is none of these, and for a file that is not a decoder's config.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from ..data.tokenizer import read_config

        source = name
        if name.lower() in MODELS:
            name = name.lower()
            config = AutoConfig.for_model(**MODELS[name])
        else:
            path = Path(name)
            path = path / "config.json" if path.is_dir() else path
            if not path.is_file():
                raise ValueError(
                    f"model {name!r} is neither known nor a file: give one of {', '.join(MODELS)}, or the path of a "
                    "transformers config.json"
                )
            kinds = read_json_object(path, "give a transformers config.json").get("architectures") or []
            if kinds and not any(kind.endswith(_GENERATES) for kind in kinds):
                raise ValueError(
                    f"{path} describes a {', '.join(kinds)}, not a causal LM: only decoders can be simulated"
                )
            config, name = read_config(str(path)).get_text_config(), path.parent.name or name
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            return cls.of(model, name=name)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{source} can't be simulated: {in_a_line(error)}") from error


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
        whole = whole_gradient_bytes(_COMPUTE * root, blocks, tied=_COMPUTE * model.tied)
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
