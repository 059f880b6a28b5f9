"""The operators that a model's layers run, the shapes of their weights, and the number of layers."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base.untyped import untyped
from ...nn.experts import Experts
from ...nn.modules import Attention, Embedding, Linear, LMHead, head_norm, project
from ...plan.decoder import CHOSEN_COUNTS, size_of


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One operator on weights of one shape: [N, K] of `linear`, [V, D] of `embedding` and `log_probs`, q's of `qkv`,
    down_proj's of `experts`, whose two products are one workload, as a layer runs both in one way.

    kv_rows: rows of k and of v; head_dim, bias, norm: those of q, k and v, as in `nn.Attention`.
    up, experts, top_k: the other projection's shape, a layer to copy, and its experts of a token.
    """

    operator: str
    shape: tuple[int, ...]
    up: tuple[int, ...] = ()
    experts: Experts | None = field(default=None, compare=False)
    top_k: int = 1
    kv_rows: int = 0
    head_dim: int = 0
    bias: bool = False
    norm: bool = False

    @property
    def name(self) -> str:
        return f"{self.operator} {', '.join(' x '.join(map(str, shape)) for shape in self.shapes)}"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of weights that the table has a line for."""
        return [self.up, self.shape] if self.up else [self.shape]

    def layer(self) -> nn.Module:
        """The layer that runs it."""
        if self.experts is not None:
            layer = copy.deepcopy(self.experts).to_empty(device="cpu")
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.02)
            return layer
        rows, columns = self.shape
        if self.operator == "linear":
            return Linear(columns, rows, bias=False)
        if self.operator == "embedding":
            return Embedding(rows, columns)
        if self.operator == "log_probs":
            return LMHead(columns, rows)
        heads, kv_heads = rows // self.head_dim, self.kv_rows // self.head_dim
        return Projections(columns, heads, kv_heads, self.head_dim, bias=self.bias, qk_norm=self.norm)

    def inputs(self, tokens: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
        """Arguments for the layer: random numbers, or ids."""
        generator = torch.Generator().manual_seed(seed)
        rows, columns = self.shape[-2:]
        if self.experts is not None:
            width = columns if self.experts.is_transposed else rows
            x = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
            chosen = torch.rand(tokens, self.shape[0], generator=generator).topk(self.top_k)[1].to(device)
            return x, chosen, x.new_full(chosen.shape, 1 / self.top_k)
        if self.operator == "embedding":
            return (torch.randint(rows, (tokens,), generator=generator).to(device),)
        x = torch.randn(tokens, columns, generator=generator).to(device, dtype).requires_grad_()
        if self.operator == "log_probs":
            return x, torch.randint(rows, (tokens,), generator=generator).to(device)
        return (x,)

    def call(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """One output tensor to start a backward from."""
        if self.operator == "log_probs":
            return layer(inputs[0]).log_probs(inputs[1]).logp
        return layer(*inputs)


class Projections(Attention):
    """q, k and v side by side, without the attention that follows, to measure `qkv` alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        del self.o_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, K]; result [T, Hq + 2 Hkv, D]."""
        half = torch.arange(self.head_dim // 2, device=x.device)
        angles = torch.arange(len(x), device=x.device)[:, None] * 1e4 ** (-2.0 * half / self.head_dim)
        turn = torch.cat((angles, angles), dim=-1)
        cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
        return torch.cat(project(self, x, cos, sin, norm=head_norm(self), choice=self.choice), dim=1)


def workloads_of(model: nn.Module) -> dict[Workload, int]:
    """The operators of a model whose layers `replace_layers` has replaced, and the number of layers of each."""
    found: Counter[Workload] = Counter()
    fused = set()
    for module in model.modules():
        if all(isinstance(getattr(module, f"{part}_proj", None), Linear) for part in "qkv"):
            q, k = module.q_proj, module.k_proj
            if q.operator != "qkv":
                continue
            fused |= {id(module.q_proj), id(module.k_proj), id(module.v_proj)}
            about = {"bias": q.bias is not None, "norm": hasattr(module, "q_norm")}
            shape = (q.out_features, q.in_features)
            found[Workload(operator="qkv", shape=shape, kv_rows=k.out_features, head_dim=module.head_dim, **about)] += 1
    for module in model.modules():
        if isinstance(module, Embedding):
            found[Workload(operator="embedding", shape=(module.num_embeddings, module.embedding_dim))] += 1
        elif isinstance(module, Experts):
            up, down = (tuple(module.get_parameter(name).shape) for name in module.names[:2])
            top_k = size_of(untyped(module).config, *CHOSEN_COUNTS)
            found[Workload(operator="experts", shape=down, up=up, experts=module, top_k=top_k)] += 1
        elif isinstance(module, LMHead):
            found[Workload(operator="log_probs", shape=(module.out_features, module.in_features))] += 1
        elif isinstance(module, Linear) and id(module) not in fused:
            found[Workload(operator="linear", shape=(module.out_features, module.in_features))] += 1
    return dict(found)
