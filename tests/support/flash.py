"""What `aten._flash_attention_forward` and `_backward` compute for sequences of different lengths, on any device.

As FlashAttention 2 does, with its traps: what it does not write is NaN, it takes no strides of a log-sum-exp, and
queries without keys get +inf as theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class Flash:
    """`empty`: the log-sum-exp without keys. Keeps the keys and values of all calls."""

    def __init__(self, empty: float = torch.inf) -> None:
        self.empty = empty
        self.calls: list[tuple[Tensor, Tensor]] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *given: Any, scale: float | None) -> tuple:
        *_, dropout, is_causal, debug = given
        assert (dropout, debug) == (0.0, False)
        self.calls.append((key, value))
        out = torch.full_like(query, torch.nan)  # also laid out alike
        lse = torch.full((query.shape[1], len(query)), torch.nan, dtype=torch.promote_types(query.dtype, torch.float32))
        for rows, seen in _sequences(query, key, *given[:4]):
            scores = _scores(query[rows], key[seen], is_causal, scale)
            lse[:, rows] = scores.logsumexp(-1) if scores.shape[-1] else self.empty
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _for_all_heads(value[seen], query))
        return out, lse, torch.empty(2), torch.empty(()), torch.empty(0)

    def backward(self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *given: Any, scale):
        lse, *ends, dropout, is_causal, _, _ = given
        assert dropout == 0.0
        self.calls.append((key, value))
        assert gradient.is_contiguous(), "or it is copied"
        assert out.is_contiguous(), "or it is copied"
        assert lse.is_contiguous()
        assert lse.shape == (query.shape[1], len(query))
        assert lse.isfinite().all()
        found = [torch.full_like(each, torch.nan) for each in (query, key, value)]
        groups, scaled = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
        for rows, seen in _sequences(query, key, *ends):
            k, v = (_for_all_heads(each[seen], query) for each in (key, value))
            q, g = query[rows], gradient[rows]
            weights = (_scores(q, key[seen], is_causal, scale) - lse[:, rows, None]).exp()
            changed = torch.einsum("qhd,khd->hqk", g, v) - (g * out[rows]).sum(-1).T[..., None]
            of_scores = weights * changed * scaled
            found[0][rows] = torch.einsum("hqk,khd->qhd", of_scores, k)
            of_all = torch.einsum("hqk,qhd->khd", of_scores, q), torch.einsum("hqk,qhd->khd", weights, g)
            for whole, each in zip(found[1:], of_all, strict=True):
                whole[seen] = each.unflatten(1, (-1, groups)).sum(2)
        return tuple(found)


def _for_all_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, _for_all_heads(key, query))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1 + len(key) - len(query)).bool(), -torch.inf)
    return scores


def _sequences(
    query: Tensor, key: Tensor, ends_of_queries: Tensor, ends_of_keys: Tensor, max_q: int, max_k: int
) -> Iterator[tuple[slice, slice]]:
    """The rows of each sequence, as far as the kernel's grid reaches."""
    assert ends_of_queries.dtype == ends_of_keys.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == 1
    assert max_q > 1 or query.shape[1] == key.shape[1], "1 means: one query in each sequence"
    pairs = (pairwise(ends.tolist()) for ends in (ends_of_queries, ends_of_keys))
    for (first, end), (low, high) in zip(*pairs, strict=True):
        yield slice(first, min(end, first + max_q)), slice(low, min(high, low + max_k))
