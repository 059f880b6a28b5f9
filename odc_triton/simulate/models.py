"""Models as the simulator needs them, from a transformers config: sizes of their units, work and memory per token.

Bytes on the fullest GPU are `memory_plan`'s sums, computed from a model's sizes alone, with nodes: bf16 compute, fp32
masters, gradients and AdamW states. Tests compare the two. Left out, less than 1%: norms, biases, alignment, rows that
don't divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..balance.cost import CostModel
from ..base.files import read_json_object
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
MODELS = tuple(_SIZES)
_GENERATES = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


@dataclass(frozen=True, kw_only=True)
class Model:
    """`layers` blocks of `block_parameters` each, and the root's (embedding, last norm, head).

    `cost` is in FLOPs of forward and backward without recomputation. `activation_bytes`: per token, bf16, with and
    without gradient checkpointing, logits not included; None for an architecture that `footprint` doesn't know.
    """

    name: str
    layers: int
    block_parameters: int
    root_parameters: int
    largest_parameter: int
    cost: CostModel
    activation_bytes: int | None
    activation_bytes_checkpointed: int | None
    logits_bytes: int
    """Per token, in bf16, and their log-probabilities in fp32: a fused head and loss never compute them."""
    kv_width: int = 0
    """Elements of a token's keys in one block, all heads; its values have as many."""

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.root_parameters

    @classmethod
    def from_config(cls, config: Any, *, name: str) -> Model:
        """A decoder with gated MLPs. Norms and biases are left out of the sizes (less than 0.1%).

        Raises what `CostModel.from_config` raises, and ValueError for a mixture of experts, which is not modelled.
        """
        if any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ValueError(f"model {name!r} is a mixture of experts, which can't be simulated: give a dense decoder")
        cost = CostModel.from_config(config)
        h, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or h // heads
        inner = getattr(config, "intermediate_size", None) or 4 * h
        block = 2 * h * heads * head_dim + 2 * h * kv_heads * head_dim + 3 * h * inner
        table = config.vocab_size * h
        logits = config.vocab_size * (2 + 4)
        known = getattr(config, "hidden_act", None) == "silu"
        kept = [
            decoder_bytes_per_token(config, itemsize=2, gradient_checkpointing=checkpointing) - logits
            if known
            else None
            for checkpointing in (False, True)
        ]
        return cls(
            name=name,
            layers=layers,
            block_parameters=block,
            root_parameters=table if getattr(config, "tie_word_embeddings", False) else 2 * table,
            largest_parameter=table,
            cost=cost,
            activation_bytes=kept[0],
            activation_bytes_checkpointed=kept[1],
            kv_width=kv_heads * head_dim,
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


_COMPUTE, _FULL = 2, 4  # bytes per element
_STATES = 2 * _FULL


def state_bytes(model: Model, schedule: str, *, shards: int, ranks: int) -> int:
    """Per GPU, what is kept between minibatches and the peak within one, without activations.

    `shards`: GPUs that together hold one copy of the parameters (all `ranks`, unless each node holds a copy). Even then
    ODC splits masters and optimizer states over all `ranks`; FSDP2 keeps them with the shards.
    """
    p, block, root, table = model.parameters, model.block_parameters, model.root_parameters, model.largest_parameter
    blocks = [_COMPUTE * block] * model.layers
    gathered = gathered_bytes(_COMPUTE * root, blocks)
    if schedule == "odc":
        whole = whole_gradient_bytes(_COMPUTE * root, blocks, tied=_COMPUTE * table if root == table else 0)
        return -(-(_COMPUTE + _FULL) * p // shards) + -(-(_FULL + _STATES) * p // ranks) + gathered + whole
    resharded = schedule == "fsdp"
    whole = fsdp2_whole_gradient_bytes(
        (_COMPUTE * root, _FULL * root),
        [(_COMPUTE * block, _FULL * block)] * model.layers,
        late_root=_COMPUTE * table,
        resharded=resharded,
        gathered_bytes=gathered,
        shard_bytes=_FULL * p // shards,
    )
    return -(-(2 * _FULL + _STATES) * p // shards) + (gathered if resharded else _COMPUTE * p) + whole


def peak_bytes(
    model: Model, schedule: str, *, shards: int, ranks: int, tokens: int, checkpointing: bool, fused_head: bool
) -> int | None:
    """With the activations of a microbatch of `tokens` tokens; None if a token's are not known."""
    each = model.activation_bytes_checkpointed if checkpointing else model.activation_bytes
    if each is None:
        return None
    each += 0 if fused_head else model.logits_bytes
    return state_bytes(model, schedule, shards=shards, ranks=ranks) + each * tokens
