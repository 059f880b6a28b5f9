"""A recurrent layer's sizes, from its transformers config: delta rules, Mamba-2, short convolutions. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import size_of


@dataclass(frozen=True, kw_only=True)
class RecurrentSizes:
    """`weights`: elements of its matrices and of its convolution of `channels` over `kernel` tokens. A state has
    `heads` of `key_width` x `value_width`, by 0 heads none. `key_heads`: of its keys, or of Mamba-2's groups. `rule`:
    "delta", "kda" (its gates are per channel), "mamba2" or "conv".
    """

    rule: str
    weights: int
    channels: int
    kernel: int
    heads: int = 0
    key_heads: int = 0
    key_width: int = 0
    value_width: int = 0

    @property
    def flops(self) -> int:
        """Of the rule's forward per token: the state is read and updated, by a delta rule first corrected."""
        return (4 if self.rule == "mamba2" else 6) * self.heads * self.key_width * self.value_width

    @property
    def is_paired(self) -> bool:
        """True if what a segment does to the state before it is a matrix, not a number per head."""
        return self.rule in ("delta", "kda")

    @property
    def words(self) -> str:
        return f"{self.rule}, {self.key_heads}, {self.heads} heads of {self.key_width}, {self.value_width}"

    @classmethod
    def of(cls, config: object) -> RecurrentSizes | None:
        """By the attributes that the config has; None for another kind of recurrence. With hidden width h, keys of all
        heads k wide, values v, G groups of Mamba-2 with states of n:

            gated delta rule       h (2 k + 3 v + 2 heads)               q, k, v, gate, output; decay and step
            Kimi delta attention   h (4 v + heads) + gates               two gates, each h v, or h d + d v in low rank
            Mamba-2                h (3 v + 2 G n + heads)               gate, v, output; B and C; step
            short convolution      4 h h                                 two gates, v, output
        """
        hidden = size_of(config, "hidden_size")

        def has(*names: str) -> int | None:
            return next((found for name in names if (found := getattr(config, name, None))), None)

        if heads := has("linear_num_value_heads"):
            key_heads, kernel = size_of(config, "linear_num_key_heads"), size_of(config, "linear_conv_kernel_dim")
            key_width, value_width = size_of(config, "linear_key_head_dim"), size_of(config, "linear_value_head_dim")
            rule, channels = "delta", 2 * key_heads * key_width + heads * value_width
            matrices = hidden * (channels + 2 * heads * value_width + 2 * heads)
        elif heads := has("linear_num_heads"):
            key_width = value_width = size_of(config, "linear_head_dim")
            rule, key_heads, kernel = "kda", heads, size_of(config, "linear_conv_kernel_dim")
            wide, channels = heads * value_width, 3 * heads * value_width
            gate = hidden * wide if hasattr(config, "kda_safe_gate") else (hidden + wide) * value_width
            matrices = hidden * (4 * wide + heads) + 2 * gate
        elif (heads := has("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")) and (
            key_heads := has("mamba_n_groups", "mamba_ngroups", "n_groups")  # which Mamba-1 lacks
        ):
            value_width = size_of(config, "mamba_d_head", "mamba_headdim", "mamba_head_dim")
            key_width, kernel = size_of(config, "mamba_d_state", "ssm_state_size"), has("mamba_d_conv", "conv_kernel")
            rule, channels = "mamba2", heads * value_width + 2 * key_heads * key_width
            matrices = hidden * (channels + 2 * heads * value_width + heads)
        elif kernel := has("conv_L_cache"):
            rule, channels, key_heads, heads, key_width, value_width = "conv", hidden, 0, 0, 0, 0
            matrices = 4 * hidden**2
        else:
            return None
        kernel = kernel or 1
        return cls(
            rule=rule,
            weights=matrices + channels * kernel,
            channels=channels,
            kernel=kernel,
            heads=heads,
            key_heads=key_heads,
            key_width=key_width,
            value_width=value_width,
        )
