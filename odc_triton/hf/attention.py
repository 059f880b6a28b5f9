"""Attention over packed sequences for transformers models.

No mask over the whole pack is ever made; attention costs the sum of the documents' squares, not the pack's square.
It runs `torch.nn.attention.varlen` on CUDA where that has a kernel, and SDPA once per document elsewhere.

[Note: what is not a pack] The same model must still generate, evaluate padded batches, and run any non-causal
or cross attention that it has. Those get the library's own mask and its SDPA. A call that would let one document see
another, or that would drop an argument, raises instead.

[Note: a prepared mask] To make a causal mask, transformers checks whether a batch is a pack, and waits for the device
to find out, once in each forward. It leaves a mask of four dimensions as it is. So a pack that has its bounds may come
with an empty one, which means to `packed_attention` what None means.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..balance.pieces import Piece
from ..sequence.attention import AttentionInTwoParts, takes
from ..sequence.layer import LayerSplit, Pair

# Keyword arguments that change attention's result and that a pack does not support.
_UNSUPPORTED_IN_PACKS = ("position_bias", "sinks", "indices", "block_indices", "cache")
PREPARED_MASK = (1, 1, 0, 0)  # the shape; see [Note: a prepared mask]
REMEDY = "Train it with one sequence per microbatch (packing off)."


class PackingUnsupported(RuntimeError):
    """The model can't be trained on packs: documents would see one another, or results would change."""


def packed_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **library: Any,
) -> Tensor | None:
    """The mask counterpart of `packed_attention` (transformers' `AttentionMaskInterface`).

    None, for a causal forward without padding or cache: `packed_attention` then keeps documents apart by
    itself. The library's SDPA mask (bool [B, 1, q_length, kv_length], or None) for anything else.

    Raises PackingUnsupported for a causal mask with an overlay of the model's own (`use_vmap`).
    """
    causal = allow_is_bidirectional_skip is None  # the library gives the argument to bidirectional masks only
    if causal and attention_mask is None and q_length == kv_length:
        if use_vmap:
            raise PackingUnsupported(f"its causal mask has an overlay that a pack would drop. {REMEDY}")
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        allow_is_bidirectional_skip=bool(allow_is_bidirectional_skip),
        **library,
    )


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """What a call of attention asks for besides q, k, v."""

    scaling: float | None  # None: 1 / sqrt(head width)
    dropout: float
    window: int | None  # tokens a query sees, itself included
    softcap: float | None
    sinks: Tensor | None  # [H], one more logit in each head's softmax

    @property
    def need_eager(self) -> bool:
        return self.softcap is not None or self.sinks is not None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    pieces: Sequence[Piece | None] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document (transformers' `AttentionInterface`).

    Shapes: query [B, H, T, D], key and value [B, Hkv, T, D] with H a multiple of Hkv; result [B, T, H, D].

    Documents begin at every row, and where `position_ids` ([1, T] or [B, T]) does not go up by one. Or they
    are `cu_seq_lens_q` (int, [documents + 1], from 0 to B * T, over the rows laid end to end), which wins. On
    CUDA, reading position ids waits for the device in every layer; cumulative lengths with `max_length_q`
    (tokens of the longest document) do not, as `pack_collate` and `to_device` give them. Keys have the queries'
    documents.

    `sliding_window` (tokens a query sees, itself included), `softcap`, `s_aux` (one sink logit per head, [H])
    and `dropout` are honoured. Calls that are not of a pack (a cache, a mask, no causality) go to the library's
    SDPA: [Note: what is not a pack].

    `pieces`: for each document the `Piece` that it is of a sample, None where it is whole. A piece's queries see the
    keys of the pieces before it, which other ranks publish (sequence/).

    Raises PackingUnsupported for a model that can't take packs (no boundaries given, an argument that would be
    dropped), ValueError for inputs that are no pack (documents in a row under a mask that joins them).
    """
    if attention_mask is not None and attention_mask.shape == PREPARED_MASK:
        attention_mask = None
    batch, length = query.shape[0], query.shape[2]
    terms = _Terms(scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    side = getattr(module, "_odc_split", None)
    if hasattr(side, "note"):  # `enable_split` looks
        side.note(module, key, value, pieces)
    has_pieces = pieces is not None and any(piece is not None for piece in pieces)
    if has_pieces and not (causal and attention_mask is None and batch == 1 and length == key.shape[2]):
        raise ValueError(f"{type(module).__name__} was given pieces of samples with a mask, a cache or no causality")
    if not has_pieces and not (causal and attention_mask is None and length == key.shape[2] and length > 1):
        _refuse_leak(module, query, key, attention_mask, position_ids, cu_seq_lens_q)
        if not terms.need_eager:
            options = {"dropout": dropout, "scaling": scaling, "is_causal": causal} | others
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        if attention_mask is None and causal and length > 1:
            # Aligned to the upper left, as SDPA's `is_causal`: a static cache's unused tail is hidden.
            attention_mask = query.new_ones(length, key.shape[2], dtype=torch.bool).tril()
        return _eager(query, key, value, attention_mask, terms).transpose(1, 2).contiguous(), None

    for name in _UNSUPPORTED_IN_PACKS:
        if others.get(name) is not None:
            raise PackingUnsupported(f"{type(module).__name__} uses `{name}`, which a pack drops. {REMEDY}")
    if position_ids is None and cu_seq_lens_q is None:
        raise PackingUnsupported(
            f"{type(module).__name__} passes neither position_ids nor cu_seq_lens_q to its attention, so "
            f"documents can't be kept apart. {REMEDY}"
        )
    if has_pieces:
        return _of_pieces(module, side, query, key, value, cu_seq_lens_q, pieces, terms), None
    one_document = cu_seq_lens_q is not None and batch == 1 and max_length_q == length
    ends = None if one_document else _cumulative_lengths(position_ids, cu_seq_lens_q, batch, length)
    if ends is None and _has_varlen_kernel(query, value, terms) and sliding_window is not None:
        # SDPA would need a mask for the window; the kernel does not.
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    if ends is None:  # every row is one document
        return _one_length(query, key, value, terms).transpose(1, 2).contiguous(), None
    if _has_varlen_kernel(query, value, terms):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * T, heads, D]
        return _varlen(q, k, v, ends, max_length_q, terms).unflatten(0, (batch, length)), None

    bounds = _bounds(ends, batch * length)
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))  # [1, heads, B * T, D]
    parts = [
        _one_length(*(x[:, :, start:end] for x in (q, k, v)), terms) for start, end in pairwise(bounds) if end > start
    ]
    return torch.cat(parts, dim=2)[0].unflatten(1, (batch, length)).permute(1, 2, 0, 3).contiguous(), None


@torch._disable_dynamo  # what it does for other ranks must be done in every forward, not once while it is traced
def _of_pieces(
    module: nn.Module,
    side: LayerSplit | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,
    pieces: Sequence[Piece | None],
    terms: _Terms,
) -> Tensor:
    """One row of documents, of which some are pieces of samples, in order. Whole documents between two pieces, and
    pieces with no keys before them, go through the variable-length kernel together.
    """
    if side is None:
        raise RuntimeError("this pack holds pieces of samples: call enable_split(model, tokens=…) after fully_shard")
    if terms.dropout:
        raise PackingUnsupported(f"{type(module).__name__} drops attention out, which is not supported in pieces")
    if ends is None:
        raise PackingUnsupported(f"{type(module).__name__} does not pass cu_seq_lens_q to its attention. {REMEDY}")
    bounds = _bounds(ends, query.shape[2])
    spans = side.exchange.spans(bounds, pieces)
    key, value = side.publish(key, value, spans, terms.window)
    fetched = dict(zip((span.first for span in spans), side.fetch(key, value, spans, terms.window), strict=True))
    joins, parts = _has_varlen_kernel(query, value, terms), []
    for _, run in groupby(range(len(pieces)), lambda at: -1 if joins and fetched.get(bounds[at]) is None else at):
        first, *others = run
        past = first + len(others) + 1
        start, end = bounds[first], bounds[past]
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        if others:
            longest = max(end - start for start, end in pairwise(bounds[first : past + 1]))
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            parts.append(_varlen(q, k, v, ends[first : past + 1] - start, longest, terms)[None])
        else:
            parts.append(_of_document(q, k, v, fetched.get(start), side.is_apart, terms))
    return side.release(torch.cat(parts, dim=1), key, value, spans)


def _of_document(
    query: Tensor, key: Tensor, value: Tensor, fetched: Pair | None, is_whole: bool, terms: _Terms
) -> Tensor:
    """[1, T, H, D]. `fetched`: the keys and values before a piece; if `is_whole`, followed by its own."""
    if fetched is not None and not is_whole:
        if takes(query, key, value) and terms.window is None and not terms.need_eager:
            return AttentionInTwoParts.apply(query, *fetched, key, value, terms.scaling).transpose(1, 2)
        fetched = torch.cat([fetched[0], key], 2), torch.cat([fetched[1], value], 2)
    if fetched is not None:
        key, value = fetched
    if not _has_varlen_kernel(query, value, terms):
        return _one_length(query, key, value, terms).transpose(1, 2)
    queries, keys = query.shape[2], key.shape[2]
    # Made on the device, so that the host does not wait for it.
    ends = [torch.arange(0, n + 1, n, dtype=torch.int32, device=query.device) for n in (queries, keys)]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _varlen(q, k, v, ends[0], queries, terms, ends_of_keys=ends[1], longest_keys=keys)[None]


def _bounds(ends: Tensor, length: int) -> list[int]:
    """Where documents begin, then `length`."""
    bounds = list(getattr(ends, "_odc_bounds", None) or ends.tolist())
    if bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
        raise ValueError(f"cu_seq_lens_q must rise from 0 to B * T = {length}, but is {bounds}.")
    return bounds


def _refuse_leak(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
) -> None:
    """Raises ValueError if this call, which does not keep documents apart, has several in a row.

    A restart of the positions that no query can see across is padding, or the caller's own block mask.
    """
    batch, length = query.shape[0], query.shape[2]
    if length == 1 or length != key.shape[2]:
        return  # decoding, a cache, cross attention: a pack has none of them
    seen = cu_seq_lens_q is not None and len(cu_seq_lens_q) - 1 > batch
    if not seen and position_ids is not None and position_ids.ndim == 2 and position_ids.shape[1] == length:
        leak = position_ids.diff(dim=-1) != 1  # [1 or B, T - 1]
        if attention_mask is not None:
            mask = attention_mask
            allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            itself = allowed.diagonal(dim1=-2, dim2=-1)[..., 1:]  # False where a query is padding
            leak = leak[:, None] & itself & allowed.diagonal(offset=-1, dim1=-2, dim2=-1)
        seen = bool(leak.any())
    if seen:
        how = "no causality" if attention_mask is None else "an attention_mask that joins them"
        raise ValueError(
            f"{type(module).__name__} was given several documents in a row with {how}, so they would see one "
            f"another. Leave attention_mask out of a pack (it has no padding)."
        )


def _cumulative_lengths(
    position_ids: Tensor | None, cu_seq_lens: Tensor | None, batch: int, length: int
) -> Tensor | None:
    """Where documents begin in the rows laid end to end, then B * T; None if each row is one document."""
    if cu_seq_lens is not None:
        return cu_seq_lens
    shape = list(position_ids.shape)
    if shape not in ([1, length], [batch, length]):
        raise ValueError(f"position_ids must be [{batch}, {length}] or [1, {length}], not {shape}.")
    restarts = position_ids.diff(dim=-1) != 1
    if not restarts.any():
        return None
    starts = F.pad(restarts, (1, 0), value=True).expand(batch, length).flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=batch * length)


def _one_length(query: Tensor, key: Tensor, value: Tensor, terms: _Terms) -> Tensor:
    """Causal attention of B documents, [B, H, L, D], whose queries are the last of their keys. The largest mask made
    is [L, keys].
    """
    length, keys = query.shape[2], key.shape[2]
    windowed = terms.window is not None and terms.window < keys
    mask = None
    if windowed or terms.need_eager or length < keys:
        mask = query.new_ones(length, keys, dtype=torch.bool).tril(keys - length)
        if windowed:
            mask = mask.triu(keys - length + 1 - terms.window)
    if terms.need_eager:
        return _eager(query, key, value, mask, terms)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=terms.dropout,
        is_causal=mask is None,
        scale=terms.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: _Terms) -> Tensor:
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
    if terms.sinks is not None:
        sinks = terms.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, terms.dropout) @ value


def _has_varlen_kernel(query: Tensor, value: Tensor, terms: _Terms) -> bool:
    """Whether `varlen_attn` (FlashAttention 2) takes these: 16-bit, on CUDA from sm_80, heads to 256 wide."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and terms.dropout == 0.0
        and not terms.need_eager
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    longest: int | None,
    terms: _Terms,
    *,
    ends_of_keys: Tensor | None = None,
    longest_keys: int = 0,
) -> Tensor:
    """Documents laid end to end, [tokens, heads, D], by the variable-length kernel.

    `ends_of_keys`, `longest_keys`: if documents have more keys than queries; the queries are then the last of their
    keys, as the kernel's causal mask is aligned to the lower right.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends = cu_seq_lens.to(device=query.device, dtype=torch.int32)
    longest = int(cu_seq_lens.diff().max() if longest is None else longest)
    gqa = {}
    if (groups := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            gqa["enable_gqa"] = True
        else:  # an older torch
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    ends_of_keys, longest_keys = (ends, longest) if ends_of_keys is None else (ends_of_keys, longest_keys)
    # The kernel counts the tokens before a query's own; (-1, 0) is plain causal.
    before = -1 if terms.window is None or terms.window >= longest_keys else terms.window - 1
    options = {"scale": terms.scaling, "window_size": (before, 0)} | gqa
    return varlen_attn(query, key, value, ends, ends_of_keys, longest, longest_keys, **options)
