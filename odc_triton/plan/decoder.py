"""A decoder's weights that a token is multiplied with, from its transformers config. Pure.

`CostModel.from_config` counts FLOPs by them. Norms and biases are left out: less than 0.1% of a model of a billion
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # one name or another, by family


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """`active`: elements of all blocks' matrices that a token is multiplied with, of experts those it is routed to.
    `table`: elements of the embedding, and as many of the head. `kv_heads` of `key_width` and `value_width`.
    """

    layers: int
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

    @classmethod
    def of(cls, config: object) -> Decoder:
        """Of the attributes of a text decoder's config, as transformers reads them. With hidden width h:

            attention           2 h q d + 2 h kv d,                          q query and kv key/value heads of d
            latent attention    h r + r q (n + p) + h (c + p) + c q (n + v) + q v h
            MLP, one expert     3 h f,                                       f its width
            router              h E,                                         E experts

        Latent attention is DeepSeek's: r = q_lora_rank (without it h q (n + p) for the first two terms), c =
        kv_lora_rank, n = qk_nope_head_dim, p = qk_rope_head_dim, v = v_head_dim. Experts are `moe_intermediate_size`
        wide, or intermediate_size. All blocks have them but the first `first_k_dense_replace`, those in
        `mlp_only_layers`, and all but each `decoder_sparse_step`-th.

        A missing num_key_value_heads means as many as query heads, a missing head_dim hidden_size / heads, a missing
        intermediate_size 4 h. Raises ValueError naming an attribute that is missing or not positive.
        """
        hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
        layers, kv_heads = size_of(config, "num_hidden_layers"), size_of(config, "num_key_value_heads", default=heads)
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
            attention = 2 * hidden * heads * key_width + 2 * hidden * kv_heads * key_width

        inner = size_of(config, "intermediate_size", default=4 * hidden)
        width = size_of(config, "moe_intermediate_size", default=inner)
        experts = expert_count(config)
        mixed = bool(experts or getattr(config, "num_experts_per_tok", None))
        each = 3 * hidden * width  # an expert
        shared = getattr(config, "n_shared_experts", 0) or 0
        mixture = hidden * experts + each * (shared + size_of(config, "num_experts_per_tok", default=1))
        dense = 3 * hidden * inner
        first = getattr(config, "first_k_dense_replace", 0) or 0
        step, only = size_of(config, "decoder_sparse_step", default=1), getattr(config, "mlp_only_layers", None) or ()
        sparse = sum(mixed and i >= first and i not in only and (i + 1) % step == 0 for i in range(layers))
        return cls(
            layers=layers,
            active=layers * attention + sparse * mixture + (layers - sparse) * dense,
            table=hidden * size_of(config, "vocab_size"),
            heads=heads,
            kv_heads=kv_heads,
            key_width=key_width,
            value_width=value_width,
        )


def expert_count(config: object) -> int:
    """Routed experts of a block; 0 for a dense model."""
    return next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), 0)


def size_of(config: object, *names: str, default: int | None = None) -> int:
    """The first of these attributes that it has. Raises ValueError naming one that is missing or not positive."""
    name = next((name for name in names if getattr(config, name, None) is not None), names[-1])
    value = getattr(config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the model's config has {name}={value!r}, which its cost depends on: give a config that "
            "sets it (of a model of several parts its text_config), or CostModel its coefficients"
        )
    return value
