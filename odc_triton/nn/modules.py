"""Layers on sharded parameters, with torch's names, arguments and state-dict keys.

Without `fully_shard` each works like the plain layer. `choice`: see docs/layers.md.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import nn
from torch.nn import functional as F

from ..machine.topology import Place
from .choice import AUTO, TABLE, Entry, choices, parse
from .functional import embedding, linear, qkv
from .functional.qkv import HeadNorm
from .functional.whole import WholeOnUse, read_whole
from .head import FusedLogits
from .tuned import Tuned, default_folder, load


class ReadsShards(nn.Module):
    """A layer of torch, with its arguments and `choice`, whose own operators take parameters that are never whole.

    Other code, such as a method that uses `embedding.weight.T` or a penalty on the weights, gets such a parameter as
    `WholeOnUse`.
    """

    choice = AUTO

    def __init__(self, *args: Any, choice: str = AUTO, **options: Any) -> None:
        parse(choice)
        super().__init__(*args, **options)
        self.choice = choice

    @staticmethod
    def tuned_tables(place: Place) -> Tuned:
        return load(place, default_folder())

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if not getattr(value, "_odc_never_whole", False):
            return value
        if torch.compiler.is_compiling():
            return read_whole(value)
        return value if value.untyped_storage().size() else WholeOnUse.of(value)  # whole between unshard and reshard


@overload
def leaf(module: nn.Module, name: Literal["weight"]) -> torch.Tensor: ...
@overload
def leaf(module: nn.Module, name: Literal["bias"]) -> torch.Tensor | None: ...
@overload
def leaf(module: nn.Module, name: str) -> Any: ...
def leaf(module: nn.Module, name: str) -> Any:
    """A module's parameter as operators take it, possibly without memory, or computed, for example by weight norm."""
    return module._parameters[name] if name in module._parameters else getattr(module, name)


def has_hooks(module: nn.Module) -> bool:
    """True if calling the module runs any user code."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class Linear(ReadsShards, nn.Linear):
    """`torch.nn.Linear`. Adds its weight's gradient directly to the owners; forward saves its input, not the weight.

    args, options: those of `torch.nn.Linear`.
    choice: the operator, docs/layers.md.
    """

    operator = "linear"  # in the table

    def reads_on_demand(self, device_type: str, table: tuple[Entry, ...] = TABLE) -> tuple[str, ...]:
        shape = (self.out_features, self.in_features)
        found = choices(self.operator, shape=shape, device_type=device_type, given=self.choice, table=table)
        return () if any(each.is_gathered for each in found) else ("weight", "bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, leaf(self, "weight"), leaf(self, "bias"), choice=self.choice)


def gathers_always(embedding: nn.Embedding) -> bool:
    """True for options that need the whole table."""
    return embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse


class Embedding(ReadsShards, nn.Embedding):
    """`torch.nn.Embedding`. Only the rows of its input are read from their owners, and their gradients added there.

    With `max_norm`, `scale_grad_by_freq` or `sparse` it gathers its weight like any module.

    args, options: those of `torch.nn.Embedding`.
    choice: the operator, docs/layers.md.
    """

    def reads_on_demand(self, device_type: str, table: tuple[Entry, ...] = TABLE) -> tuple[str, ...]:
        shape = (self.num_embeddings, self.embedding_dim)
        found = choices("embedding", shape=shape, device_type=device_type, given=self.choice, table=table)
        return () if gathers_always(self) or any(each.is_gathered for each in found) else ("weight",)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if gathers_always(self):
            return super().forward(input)
        return embedding(input, leaf(self, "weight"), padding_idx=self.padding_idx, choice=self.choice)


class Attention(nn.Module):
    """Self-attention with grouped heads: q, k, v by one operator, `scaled_dot_product_attention`, and the projection.

    State-dict keys are those of transformers' Llama.

    hidden_size: K, of the input.
    num_heads: of q.
    num_kv_heads: of k and v, by default the same.
    head_dim: D, by default hidden_size / num_heads.
    bias: of q, k and v.
    qk_norm: RMSNorm of each head of q and of k.
    eps: of these norms.
    choice: the operator, docs/layers.md.
    device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
        choice: str = AUTO,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads of q can't share {num_kv_heads} of k and v evenly")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of {num_heads} heads; give head_dim")
        self.head_dim, self.choice = head_dim or hidden_size // num_heads, choice
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs of elements")
        like = {"choice": choice, "device": device, "dtype": dtype}
        self.q_proj = Linear(hidden_size, num_heads * self.head_dim, bias, **like)
        self.k_proj = Linear(hidden_size, num_kv_heads * self.head_dim, bias, **like)
        self.v_proj = Linear(hidden_size, num_kv_heads * self.head_dim, bias, **like)
        self.o_proj = Linear(num_heads * self.head_dim, hidden_size, False, **like)
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=eps, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=eps, device=device, dtype=dtype)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.operator = "qkv"

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = True,
    ) -> torch.Tensor:
        """Attends.

        x: [B, T, K].
        cos, sin: [B or 1, T, D].
        attn_mask: as in `scaled_dot_product_attention`.
        is_causal: does nothing with a mask.

        Returns a tensor as x. Raises ValueError for other shapes.
        """
        if x.ndim != 3 or x.shape[2] != self.q_proj.in_features:
            raise ValueError(f"x is {tuple(x.shape)}; give [B, T, {self.q_proj.in_features}]")
        for name, table in (("cos", cos), ("sin", sin)):
            if table.ndim != 3 or table.shape[0] not in (1, len(x)) or table.shape[1:] != (x.shape[1], self.head_dim):
                raise ValueError(
                    f"{name} is {tuple(table.shape)}; with x of {tuple(x.shape)} give [1 or {len(x)}, {x.shape[1]}, "
                    f"{self.head_dim}]"
                )
        q, k, v = project(self, x, cos, sin, norm=head_norm(self), choice=self.choice)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=attn_mask,
            is_causal=is_causal and attn_mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


def head_norm(attention: Any) -> HeadNorm | None:
    """The norms of an attention layer's heads, of torch's RMSNorm or of transformers' own."""
    if not hasattr(attention, "q_norm"):
        return None
    norms = attention.q_norm, attention.k_norm
    eps = getattr(norms[0], "variance_epsilon", None)
    return HeadNorm(q_weight=norms[0].weight, k_weight=norms[1].weight, eps=norms[0].eps if eps is None else eps)


def project(
    attention: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, norm: HeadNorm | None, choice: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of a layer that has q_proj, k_proj and v_proj; see `odc_triton.nn.functional.qkv`."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    weights = [leaf(each, "weight") for each in projections]
    biases = [leaf(each, "bias") for each in projections]
    biases = [bias for bias in biases if bias is not None]  # all or none
    return qkv(x, weights, biases or None, cos, sin, head_dim=attention.head_dim, norm=norm, choice=choice)


class LMHead(ReadsShards, nn.Linear):
    """The vocabulary projection of a language model, [.., D] -> [.., V], without bias.

    In training it returns a `FusedLogits`: shape and cross-entropy of logits that are never computed; in evaluation,
    the logits. In training its weight is never gathered: it is read, and its gradient added, a chunk of one owner's
    rows at a time.

    in_features: D.
    out_features: V.
    device, dtype: of the weight.
    choice: the operator, docs/layers.md.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        choice: str = AUTO,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype, choice=choice)

    def reads_on_demand(self, device_type: str, table: tuple[Entry, ...] = TABLE) -> tuple[str, ...]:
        return ("weight",)

    def forward(self, h: torch.Tensor) -> torch.Tensor | FusedLogits:
        if self.training:
            return FusedLogits(h, leaf(self, "weight"), choice=self.choice)
        return F.linear(h, self.weight)
