"""Attention of a piece over the keys before it and its own, without a mask and without joining them in memory.

    a = softmax over the keys before, all visible;  b = causal softmax over the own keys
    lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Each part's backward takes the joined `out` and `lse`, as its weights are exp(scores - lse): the parts' gradients are
those of one attention over all keys (FlashAttention, arXiv 2205.14135, Algorithm 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionInTwoParts(torch.autograd.Function):
    """query [1, H, T, D]; keys and values before it [1, Hkv, P, D], and its own [1, Hkv, T, D]; on a CPU.

    Saved: what goes in, `out` and `lse`. Keys before it are views of shared memory where ranks share one: no copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys_before: torch.Tensor,
        values_before: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        out_a, lse_a = _forward(query, keys_before, values_before, 0.0, False, scale=scale)
        out_b, lse_b = _forward(query, keys, values, 0.0, True, scale=scale)
        lse = torch.logaddexp(lse_a, lse_b)
        out = out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None]
        out = out.to(query.dtype)
        ctx.save_for_backward(query, keys_before, values_before, keys, values, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys_before, values_before, keys, values, out, lse = ctx.saved_tensors
        common = (out, lse, 0.0)
        before = _backward(gradient, query, keys_before, values_before, *common, False, scale=ctx.scale)
        own = _backward(gradient, query, keys, values, *common, True, scale=ctx.scale)
        return before[0] + own[0], before[1], before[2], own[1], own[2], None


class AttentionOfTree(torch.autograd.Function):
    """query [1, H, T, D], keys and values [1, Hkv, T, D] of a pack of documents at `bounds`, on a CPU.

    `branches`: for each document the rows [first, end) that its queries see besides its own. Documents side by side
    that see the same rows are one call on them, so these rows' gradient is computed once. Saved: what goes in, `out`
    and `lse`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bounds: Sequence[int],
        branches: Sequence[Sequence[tuple[int, int]]],
        scale: float | None,
    ) -> torch.Tensor:
        parts = [(start, end, start, end, True) for start, end in pairwise(bounds)]
        for rows in dict.fromkeys(rows for of_document in branches for rows in of_document):
            for sees, run in groupby(range(len(branches)), lambda at, rows=rows: rows in branches[at]):
                if sees:
                    members = list(run)
                    parts.append((bounds[members[0]], bounds[members[-1] + 1], *rows, False))
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        if query.dtype == torch.float64:
            lse = lse.double()
        for start, end, low, high, is_own in parts:
            of_part = (query[:, :, start:end], keys[:, :, low:high], values[:, :, low:high])
            more, theirs = _forward(*of_part, 0.0, is_own, scale=scale)
            if not is_own:
                before, mine = lse[:, :, start:end], out[:, :, start:end]
                joined = torch.logaddexp(before, theirs)
                more = mine * (before - joined).exp()[..., None] + more * (theirs - joined).exp()[..., None]
                theirs = joined
            out[:, :, start:end], lse[:, :, start:end] = more, theirs
        ctx.save_for_backward(query, keys, values, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys, values, out, lse = ctx.saved_tensors
        found = [torch.zeros_like(each) for each in (query, keys, values)]
        for start, end, low, high, is_own in ctx.parts:
            own, theirs = (..., slice(start, end), slice(None)), (..., slice(low, high), slice(None))
            given = (gradient[own], query[own], keys[theirs], values[theirs], out[own], lse[..., start:end])
            of_part = _backward(*given, 0.0, is_own, scale=ctx.scale)
            for whole, rows, each in zip(found, (own, theirs, theirs), of_part, strict=True):
                whole[rows] += each
        return *found, None, None, None


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True if the classes above can compute it. Not under autocast, which knows SDPA and not its parts."""
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and alike and not torch.is_autocast_enabled("cpu")
