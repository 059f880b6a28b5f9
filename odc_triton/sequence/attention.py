"""Attention of documents that see rows before their own, without a mask and without joining them in memory.

    a = softmax over the keys before, all visible;  b = causal softmax over the own keys
    lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Each part's backward takes the joined `out` and `lse`, as its weights are exp(scores - lse): the parts' gradients are
those of one attention over all keys (FlashAttention, arXiv 2205.14135, Algorithm 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SeenRows(NamedTuple):
    """Rows `low` up to, not including, `high` of a source: 0 is the pack itself, n the n-th that is given besides."""

    source: int
    low: int
    high: int


class AttentionPart(NamedTuple):
    """The queries of rows `start` up to, not including, `end` attend to the rows `low` up to `high` of `source`.

    To their own causally, to others all of them. `source`: see `SeenRows`.
    """

    start: int
    end: int
    source: int
    low: int
    high: int

    @property
    def is_own(self) -> bool:
        return self.source == 0 and self.low == self.start


def parts_of(bounds: Sequence[int], seen: Sequence[Sequence[SeenRows]]) -> list[AttentionPart]:
    """The parts of a pack's attention: those of the documents on their own rows, then, with `seen`, for each document
    the rows that it sees before its own, the others. Documents side by side that see the same rows share a part, so
    that these rows' gradient is computed once.
    """
    parts = [AttentionPart(start, end, 0, start, end) for start, end in pairwise(bounds)]
    last: dict[SeenRows, int] = {}
    for (start, end), rows in zip(pairwise(bounds), seen, strict=True):
        for each in rows:
            at = last.get(each)
            if at is not None and parts[at].end == start:
                parts[at] = parts[at]._replace(end=end)
            else:
                last[each] = len(parts)
                parts.append(AttentionPart(start, end, *each))
    return parts


class AttentionOfTree(torch.autograd.Function):
    """query [1, H, T, D], keys and values [1, Hkv, T, D] of a pack, on a CPU. `before`: two for each further source,
    keys and values [1, Hkv, P, D]; views of shared memory where ranks share one, so nothing is copied.

    Saved: what goes in, `out` and `lse`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        parts: Sequence[AttentionPart],
        scale: float | None,
        *before: torch.Tensor,
    ) -> torch.Tensor:
        sources = (keys, values, *before)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        if query.dtype == torch.float64:
            lse = lse.double()
        for part in parts:
            rows = (sources[2 * part.source + kind][:, :, part.low : part.high] for kind in (0, 1))
            more, theirs = _forward(query[:, :, part.start : part.end], *rows, 0.0, part.is_own, scale=scale)
            mine, weights = out[:, :, part.start : part.end], lse[:, :, part.start : part.end]
            if not part.is_own:
                joined = torch.logaddexp(weights, theirs)
                more = mine * (weights - joined).exp()[..., None] + more * (theirs - joined).exp()[..., None]
                theirs = joined
            mine.copy_(more)
            weights.copy_(theirs)
        ctx.save_for_backward(query, *sources, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, *sources, out, lse = ctx.saved_tensors
        found = [torch.zeros_like(each) for each in (query, *sources)]
        for part in ctx.parts:
            own = (..., slice(part.start, part.end), slice(None))
            theirs = (..., slice(part.low, part.high), slice(None))
            rows = [sources[2 * part.source + kind][theirs] for kind in (0, 1)]
            given = (gradient[own], query[own], *rows, out[own], lse[..., part.start : part.end])
            of_part = _backward(*given, 0.0, part.is_own, scale=ctx.scale)
            places = (found[0][own], *(found[1 + 2 * part.source + kind][theirs] for kind in (0, 1)))
            for place, each in zip(places, of_part, strict=True):
                place += each
        return *found[:3], None, None, *found[3:]


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True if the class above can compute it. Not under autocast, which knows SDPA and not its parts."""
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and alike and not torch.is_autocast_enabled("cpu")
