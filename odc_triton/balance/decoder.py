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
    def of(cls, config: object, *, gated_mlp: bool = True) -> Decoder:
        """Of the attributes of a text decoder's config, as transformers reads them. With hidden width h:

            attention           2 h q d + 2 h kv d,                          q query and kv key/value heads of d
            latent attention    h r + r q (n + p) + h (c + p) + c q (n + v) + q v h
            MLP, one expert     3 h f (2 h f without `gated_mlp`),           f its width
            router              h E,                                         E experts

        Latent attention is DeepSeek's: r = q_lora_rank (without it h q (n + p) for the first two terms), c =
        kv_lora_rank, n = qk_nope_head_dim, p = qk_rope_head_dim, v = v_head_dim. Experts are `moe_intermediate_size`
        wide, or intermediate_size. All blocks have them but the first `first_k_dense_replace`, those in
        `mlp_only_layers`, and all but each `decoder_sparse_step`-th.

        A missing num_key_value_heads means as many as query heads, a missing head_dim hidden_size / heads, a missing
        intermediate_size 4 h. Raises ValueError naming an attribute that is missing or not positive.
        """
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        layers, matrices = _size(config, "num_hidden_layers"), 3 if gated_mlp else 2
        kv_heads = _size(config, "num_key_value_heads", heads)
        if getattr(config, "kv_lora_rank", None):
            latent, rope = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
            plain, value_width = _size(config, "qk_nope_head_dim"), _size(config, "v_head_dim")
            kv_heads, key_width = heads, plain + rope
            through = getattr(config, "q_lora_rank", None)
            attention = through * (hidden + heads * key_width) if through else hidden * heads * key_width
            attention += hidden * (latent + rope) + latent * heads * (plain + value_width)
            attention += heads * value_width * hidden
        else:
            key_width = value_width = _size(config, "head_dim", max(1, hidden // heads))
            attention = 2 * hidden * heads * key_width + 2 * hidden * kv_heads * key_width

        inner = _size(config, "intermediate_size", 4 * hidden)
        width = _size(config, "moe_intermediate_size", inner)
        experts = expert_count(config)
        mixed = bool(experts or getattr(config, "num_experts_per_tok", None))
        each = matrices * hidden * width  # an expert
        shared = getattr(config, "n_shared_experts", 0) or 0
        mixture = hidden * experts + each * (shared + _size(config, "num_experts_per_tok", 1))
        dense = matrices * hidden * inner
        first = getattr(config, "first_k_dense_replace", 0) or 0
        step, only = _size(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
        sparse = sum(mixed and i >= first and i not in only and (i + 1) % step == 0 for i in range(layers))
        return cls(
            layers=layers,
            active=layers * attention + sparse * mixture + (layers - sparse) * dense,
            table=hidden * _size(config, "vocab_size"),
            heads=heads,
            kv_heads=kv_heads,
            key_width=key_width,
            value_width=value_width,
        )


def expert_count(config: object) -> int:
    """Routed experts of a block; 0 for a dense model."""
    return next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), 0)


def _size(config: object, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the model's config has {name}={value!r}, which its cost depends on: give the config of a text decoder "
            "(of a model of several parts its text_config), or CostModel its coefficients"
        )
    return value
