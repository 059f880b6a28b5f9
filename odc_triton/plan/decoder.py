"""A decoder's weights that a token is multiplied with, from its transformers config. Pure.

`CostModel.from_config` counts FLOPs by them. Norms and biases are left out: less than 0.1% of a model of a billion
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .recurrence import RecurrentSizes
from .sizes import size_of

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # one name or another, by family
CHOSEN_COUNTS = ("top_k_experts", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_tok")  # likewise
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """`active`: elements of all blocks' matrices that a token is multiplied with, of experts those it is routed to.
    `table`: elements of the embedding, and as many of the head. `attending` of its `layers` have attention with
    `kv_heads` of `key_width` and `value_width`; `recurring` have the layer that `recurrent` describes, if it is known.
    """

    layers: int
    attending: int
    recurring: int = 0
    recurrent: RecurrentSizes | None = None
    active: int
    table: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int

    @property
    def words(self) -> str:
        """What the times of its attention and of its linear layers depend on."""
        return f"{self.heads}, {self.kv_heads} heads of {self.key_width}, {self.value_width} in {self.active} weights"

    @property
    def rule_words(self) -> str:
        """The same of its recurrent layers' rule; empty without one."""
        return "" if self.recurrent is None else f"{self.recurrent.words} in {self.active} weights"

    @classmethod
    def of(cls, config: Any) -> Decoder:
        """Of the attributes of a text decoder's config, as transformers reads them. With hidden width h:

            attention           2 h q d + 2 h kv d,                          q query and kv key/value heads of d
            latent attention    h r + r q (n + p) + h (c + p) + c q (n + v) + q v h
            MLP, one expert     3 h f,                                       f its width
            router              h E,                                         E experts

        Latent attention is DeepSeek's: r = q_lora_rank (without it h q (n + p) for the first two terms), c =
        kv_lora_rank, n = qk_nope_head_dim, p = qk_rope_head_dim, v = v_head_dim. Experts are `moe_intermediate_size`
        wide, or intermediate_size. All blocks have them but the first `first_k_dense_replace`, those in
        `mlp_only_layers`, and all but each `decoder_sparse_step`-th; or `mlp_layer_types` says which. `layer_types`
        says which blocks have attention, a recurrent layer (`RecurrentSizes`) or, "hybrid", both.

        A missing num_key_value_heads means as many as query heads, a missing head_dim hidden_size / heads, a missing
        intermediate_size 4 h. Raises ValueError naming an attribute that is missing or not positive.
        """
        hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
        layers, kv_heads = size_of(config, "num_hidden_layers"), size_of(config, "num_key_value_heads", default=heads)
        kinds = layer_kinds(config)
        attends, recurs = [*map(has_attention, kinds)], [*map(_recurs, kinds)]
        family = getattr(config, "model_type", "")
        if getattr(config, "kv_lora_rank", None):
            latent, rope = size_of(config, "kv_lora_rank"), size_of(config, "qk_rope_head_dim")
            plain, value_width = size_of(config, "qk_nope_head_dim"), size_of(config, "v_head_dim")
            kv_heads, key_width = heads, plain + rope
            through = getattr(config, "q_lora_rank", None)
            attention = through * (hidden + heads * key_width) if through else hidden * heads * key_width
            attention += hidden * (latent + rope) + latent * heads * (plain + value_width)
            attention += heads * value_width * hidden
        else:
            key_width = value_width = size_of(config, "head_dim", default=max(1, hidden // heads))
            wide = getattr(config, "attention_hidden_size", None) or hidden  # Zamba2's, which also reads the embedding
            attention = wide * (heads + 2 * kv_heads) * key_width + hidden * heads * key_width
        if family.startswith(("qwen3_next", "qwen3_5")):  # gates on attention's output
            attention += hidden * heads * value_width
        elif family == "bailing_hybrid" or getattr(config, "use_attention_gate", False):
            attention += hidden * heads
        if rank := getattr(config, "adapter_rank", None):  # Zamba2's, and a projection
            adapted = 3 * (wide + heads * key_width) if getattr(config, "use_shared_attention_adapter", False) else 0
            attention += rank * (adapted + hidden + 2 * size_of(config, "intermediate_size")) + hidden**2
        recurrent = RecurrentSizes.of(config) if any(recurs) else None

        inner = size_of(config, "intermediate_size", default=4 * hidden)
        width = size_of(config, "moe_intermediate_size", default=inner)
        if getattr(config, "block_auto_adjust_ff_dim", False):  # Lfm2's
            inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
            inner = -(-inner // config.block_multiple_of) * config.block_multiple_of
        experts = expert_count(config)
        products = 2 if hasattr(config, "mlp_hidden_act") else 3  # of an MLP
        latent = getattr(config, "moe_latent_size", None)
        each = products * (latent or hidden) * width  # an expert
        shared = next((found for name in _SHARED if (found := getattr(config, name, None))), 0)
        if family == "granitemoehybrid" and not experts:
            inner = shared
        shared = shared or width * (getattr(config, "n_shared_experts", 0) or 0)
        mixture = hidden * experts + each * size_of(config, *CHOSEN_COUNTS, default=1)
        mixture += products * hidden * shared + 2 * hidden * (latent or 0)
        mixture += hidden * bool(getattr(config, _SHARED[0], None))  # the shared expert's gate
        mlps = _mlps(config, kinds, bool(experts))
        active = sum(attends) * attention + mlps.count("sparse") * mixture
        active += mlps.count("dense") * products * hidden * inner
        for attending, recurring in zip(attends, recurs, strict=True):
            active += recurring * (recurrent.weights if recurrent else attention * (not attending))
        return cls(
            layers=layers,
            attending=sum(attends),
            recurring=sum(recurs),
            recurrent=recurrent,
            active=active,
            table=hidden * size_of(config, "vocab_size"),
            heads=heads,
            kv_heads=kv_heads,
            key_width=key_width,
            value_width=value_width,
        )


def layer_kinds(config: object) -> list[str]:
    """Of each block, as transformers names them; all are of attention if the config doesn't say."""
    layers = size_of(config, "num_hidden_layers")
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return [kind or "full_attention" for kind in (kinds or [None] * layers)][:layers]


def has_attention(kind: str) -> bool:
    return kind not in ("linear_attention", "mamba", "conv", "mlp", "moe")


def is_hybrid(config: object) -> bool:
    """True if some of its blocks recur. False for None and what is no transformer's config."""
    return bool(getattr(config, "num_hidden_layers", None)) and any(map(_recurs, layer_kinds(config)))


def _recurs(kind: str) -> bool:
    return kind in ("linear_attention", "mamba", "conv", "hybrid")


def _mlps(config: object, kinds: list[str], mixed: bool) -> list[str]:
    """Of each block "dense", "sparse" for experts, or "" for none."""
    if getattr(config, "model_type", "") == "nemotron_h":  # a block is one thing
        return [{"mlp": "dense", "moe": "sparse"}.get(kind, "") for kind in kinds]
    if hasattr(config, "adapter_rank"):  # Zamba2's, in the shared blocks
        return ["dense" * (kind == "hybrid") for kind in kinds]
    if found := getattr(config, "mlp_layer_types", None):
        return ["dense" if kind == "dense" else "sparse" for kind in found]
    mixed = mixed or (all(not hasattr(config, n) for n in EXPERT_COUNTS) and hasattr(config, "num_experts_per_tok"))
    first = getattr(config, "first_k_dense_replace", 0) or getattr(config, "num_dense_layers", 0) or 0
    step, only = size_of(config, "decoder_sparse_step", default=1), getattr(config, "mlp_only_layers", None) or ()
    sparse = (mixed and i >= first and i not in only and (i + 1) % step == 0 for i in range(len(kinds)))
    return ["sparse" if each else "dense" for each in sparse]


def expert_count(config: object) -> int:
    """Routed experts of a block; 0 for a dense model."""
    return next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), 0)
