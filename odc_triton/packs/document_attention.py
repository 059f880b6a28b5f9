"""Attention of documents in separate tensors, or laid end to end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionTerms:
    """Arguments of attention other than q, k, v, by transformers' names."""

    scaling: float | None = None  # None: 1 / sqrt(head width)
    dropout: float = 0.0
    sliding_window: int | None = None  # tokens a query sees, itself included
    softcap: float | None = None
    s_aux: Tensor | None = None  # [H], sinks: one more logit in each head's softmax

    @property
    def need_eager(self) -> bool:
        return self.softcap is not None or self.s_aux is not None

    def fit_kernel(self, query: Tensor, value: Tensor) -> bool:
        """True if `varlen_attn` (FlashAttention 2) takes these: 16-bit, on CUDA from sm_80, heads to 256 wide."""
        return (
            query.is_cuda
            and query.dtype in (torch.float16, torch.bfloat16)
            and query.shape[-1] == value.shape[-1] <= 256
            and query.shape[-1] % 8 == 0
            and self.dropout == 0.0
            and not self.need_eager
            and torch.cuda.get_device_capability(query.device) >= (8, 0)
        )


def of_document(query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms, *, causal: bool = True) -> Tensor:
    """[1, T, H, D] of one document, whose queries are the last of their keys. Without `causal` each sees all of them,
    but for a window those before it.
    """
    if not terms.fit_kernel(query, value):
        return one_length(query, key, value, terms, causal=causal).transpose(1, 2)
    queries, keys = query.shape[2], key.shape[2]
    # Made on the device, without a synchronisation.
    ends = [torch.arange(0, n + 1, n, dtype=torch.int32, device=query.device) for n in (queries, keys)]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen(q, k, v, ends[0], queries, terms, ends_of_keys=ends[1], longest_keys=keys, causal=causal)[None]


def one_length(query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms, *, causal: bool = True) -> Tensor:
    """Attention of B documents, [B, H, L, D], whose queries are the last of their keys. The largest mask made is
    [L, keys]. `causal`: as in `of_document`.
    """
    length, keys = query.shape[2], key.shape[2]
    window = terms.sliding_window if terms.sliding_window is not None and terms.sliding_window < keys else None
    mask = None
    if window is not None or (causal and (terms.need_eager or length < keys)):
        mask = query.new_ones(length, keys, dtype=torch.bool)
        if causal:
            mask = mask.tril(keys - length)
        if window is not None:
            mask = mask.triu(keys - length + 1 - window)
    if terms.need_eager:
        return eager(query, key, value, mask, terms)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=terms.dropout,
        is_causal=causal and mask is None,
        scale=terms.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: AttentionTerms) -> Tensor:
    """softmax(cap(q kᵀ * scaling) + mask, with sinks) v, softmax in fp32: SDPA has no arguments for these.

    Source: `eager_attention_forward` of transformers' modeling_gemma2.py (softcap) and modeling_gpt_oss.py.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if terms.scaling is None else terms.scaling)
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.float()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if terms.s_aux is not None:
        sinks = terms.s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, terms.dropout) @ value


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    longest: int | None,
    terms: AttentionTerms,
    *,
    ends_of_keys: Tensor | None = None,
    longest_keys: int = 0,
    causal: bool = True,
) -> Tensor:
    """Documents laid end to end, [tokens, heads, D], by the variable-length kernel.

    `ends_of_keys`, `longest_keys`: if documents have more keys than queries; the queries are then the last of their
    keys, as the kernel's masks are aligned to the lower right.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends = cu_seq_lens.to(device=query.device, dtype=torch.int32)
    longest = int(cu_seq_lens.diff().max() if longest is None else longest)
    ends_of_keys, longest_keys = (ends, longest) if ends_of_keys is None else (ends_of_keys, longest_keys)
    # The kernel counts the tokens before a query's own; (-1, 0) is plain causal.
    window = terms.sliding_window
    before = -1 if window is None or window >= longest_keys else window - 1
    options = {"scale": terms.scaling, "window_size": (before, 0 if causal else -1)}
    if query.shape[1] != key.shape[1] and _takes_enable_gqa(varlen_attn):
        options["enable_gqa"] = True
    out = varlen_attn(query, key, value, ends, ends_of_keys, longest, longest_keys, **options)
    assert isinstance(out, Tensor), "no more was asked for"
    return out


@functools.cache
def _takes_enable_gqa(attention: Callable[..., Tensor]) -> bool:
    """Torch 2.11's has no such option: it takes grouped keys as they are."""
    return "enable_gqa" in inspect.signature(attention).parameters
