"""Attention over packed sequences for transformers models.

No mask over the whole pack is ever made; attention costs the sum of the documents' squares, not the pack's square.
It runs `torch.nn.attention.varlen` on CUDA if that has a kernel, and SDPA once per document otherwise
(`document_attention.py`).

[Note: what is not a pack] The same model must still generate, evaluate padded batches, and run any non-causal
or cross attention that it has. Those get the library's own mask and its SDPA. A call that would let one document see
another, or that would drop an argument, raises instead.

[Note: a prepared mask] To make a causal mask, transformers checks whether a batch is a pack, which synchronises with
the device once in each forward. It passes a mask of four dimensions through. So a pack with bounds may come with an
empty one, which `packed_attention` treats as None.

[Note: told by positions] StableLM's and Nemotron's layers drop arguments that they don't know, but pass the very tensor
position_ids on, also when checkpointing computes them again. So what tells of segments is its attribute. Each forward
has a tensor of its own: the attribute never outlives its pack.

[Note: keys by index] An indexer (DeepSeek-V3.2, GLM-5, HY-V4) chooses the keys of each query: it needs a mask, and
gives `indices`. Its packs have transformers' mask of their documents, and cost the pack's square, as its scores do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..base.untyped import untyped
from ..plan.entries import Segment, bounds_on_host
from ..sequence.attention import AttentionOfJoined, AttentionOfTree, SeenRows, parts_of, takes
from ..sequence.flash import FlashAttentionOfTree
from ..sequence.layer import LayerSplit, RowsOfOthers
from ..sequence.tree import rows_before
from .document_attention import AttentionTerms, eager, of_document, one_length, varlen

# Keyword arguments that change attention's result and that a pack does not support.
_UNSUPPORTED_IN_PACKS = ("position_bias", "sinks", "indices", "block_indices", "cache")
PREPARED_MASK = (1, 1, 0, 0)  # the shape; see [Note: a prepared mask]
_JOINED = (
    "{} was given several documents in a row {}, so they would see one another. Leave attention_mask out of a pack (it "
    "has no padding)."
)
REMEDY = "odc-triton's commands and trainers always pack: train this model in your loop, one sequence per microbatch."


class PackingUnsupported(RuntimeError):
    """The model can't be trained on packs: documents would see each other, or results would change."""


def chooses_keys(config: Any) -> bool:
    """True for a text config of a model by [Note: keys by index]."""
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def packed_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **library: Any,
) -> Tensor | None:
    """The mask counterpart of `packed_attention` (transformers' `AttentionMaskInterface`, whose arguments it takes).

    Returns None for a causal forward without padding or cache: `packed_attention` then separates the documents. Else,
    and for a model whose layers choose keys by an indexer, the library's SDPA mask: bool [B, 1, q_length, kv_length],
    or None.

    q_length, kv_length, attention_mask, use_vmap, allow_is_bidirectional_skip, library: as transformers gives them.

    Raises PackingUnsupported for a causal mask with an overlay of the model's own (`use_vmap`).
    """
    causal = allow_is_bidirectional_skip is None  # the library gives the argument to bidirectional masks only
    if causal and attention_mask is None and q_length == kv_length:
        # transformers adds blocks of tokens that see each other (`block_sequence_ids`) without `use_vmap`.
        if use_vmap or library["mask_function"].__qualname__.startswith("or_masks"):
            raise PackingUnsupported(f"its causal mask has an overlay that a pack would drop. {REMEDY}")
        if not chooses_keys(library["config"]):
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
class _Call(AttentionTerms):
    """The arguments of `packed_attention`. `others`: unknown ones."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    position_ids: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    max_length_q: int | None = None
    segments: Sequence[Segment | None] | None = None
    image_blocks: Sequence[tuple[int, int, int]] = ()
    others: dict[str, Any]

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def length(self) -> int:
        return self.query.shape[2]

    @property
    def has_segments(self) -> bool:
        return self.segments is not None and any(segment is not None for segment in self.segments)

    @property
    def may_be_pack(self) -> bool:
        return self.is_causal and self.mask is None and self.length == self.key.shape[2]


_KEYWORDS = tuple(each.name for each in fields(_Call) if each.default is not MISSING)
_OF_PACKS = ("cu_seq_lens_q", "max_length_q", "segments", "image_blocks")


def tell_by_positions(model: nn.Module, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """A pre-hook of a model's forward: [Note: told by positions]. Raises ValueError for segments without
    position_ids."""
    mask = given.get("attention_mask")
    is_masked = mask is not None and getattr(mask, "shape", None) != PREPARED_MASK
    if given.get("segments") is None and (is_masked or given.get("position_ids") is None):
        return None  # see [Note: what is not a pack]
    if given.get("position_ids") is None:
        raise ValueError(f"{type(model).__name__} was given segments of samples: give position_ids too, by name")
    positions = given["position_ids"].view_as(given["position_ids"])
    positions._odc_pack = {name: given[name] for name in _OF_PACKS if given.get(name) is not None}
    return args, given | {"position_ids": positions}


def keep_documents(model: nn.Module, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """A pre-hook of a model by [Note: keys by index]: transformers' mask separates documents by position_ids if there
    is neither an attention_mask nor a cache, which a training forward makes too. Raises ValueError for what joins them.
    """
    positions, mask, ends = (given.get(name) for name in ("position_ids", "attention_mask", "cu_seq_lens_q"))
    if positions is None and ends is not None and len(ends) > 2:
        raise ValueError(f"{type(model).__name__} was given the bounds of several documents: give position_ids too")
    if positions is None or (mask is not None and mask.shape != positions.shape):
        return None
    restarts = positions.diff(dim=-1) != 1
    if mask is not None and bool((restarts & mask[:, 1:].bool() & mask[:, :-1].bool()).any()):
        raise ValueError(_JOINED.format(type(model).__name__, "with an attention_mask that joins them"))
    fresh = mask is None and given.get("past_key_values") is None and given.get("cache") is None
    return (args, given | {"use_cache": False}) if fresh and bool(restarts.any()) else None


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention within each document (transformers' `AttentionInterface`). `enable_packing` registers it.

    Documents begin at every row, and where `position_ids` ([1, T] or [B, T]) does not go up by one. Or they are
    `cu_seq_lens_q` (int, [documents + 1], from 0 to B * T, over the rows laid end to end), which wins. On CUDA, reading
    position ids synchronises with the device in every layer; cumulative lengths with `max_length_q` (tokens of the
    longest document), as from `pack_collate` and `to_device`, do not. Keys have the queries' documents.

    `sliding_window` (tokens a query sees, itself included), `softcap`, `s_aux` (one sink logit per head, [H]),
    `scaling` and `dropout` are honoured. Calls that are not of a pack (a cache, a mask, `is_causal=False`) go to the
    library's SDPA, with all other options.

    `segments` has for each document its `Segment` of a sample, None if it is whole. A segment's queries see the keys of
    all tokens before it, which other segments of this pack compute, or those of other ranks, which publish them. With
    `image_blocks`, as of `pack_collate`, in one row, each of a block's queries also sees those after it in the block.
    With a mask and `indices` (int, [B, T, chosen]) a query sees the keys that an indexer has chosen for it.

    module: the layer.
    query: [B, H, T, D].
    key, value: [B, Hkv, T, D], H a multiple of Hkv.
    attention_mask: None for a pack.
    options: what is said above.

    Returns [B, T, H, D], and None. Raises PackingUnsupported for a model that can't take packs (no boundaries, an
    argument that would be dropped), ValueError for inputs that are not a pack (documents in a row under a mask that
    joins them), NotImplementedError for segments of samples whose keys are chosen by an indexer.
    """
    attend = _outside_of_graphs if getattr(module, "_odc_outside_of_graphs", False) else _packed_attention
    return attend(module, query, key, value, attention_mask, **options)


def attend_outside_of_graphs(block: nn.Module) -> None:
    """Compiled blocks then have no graph for each number of documents; with a checkpoint inside of them none at all."""
    for module in map(untyped, block.modules()):
        module._odc_outside_of_graphs = True


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    mask = None if attention_mask is not None and attention_mask.shape == PREPARED_MASK else attention_mask
    if (is_causal := options.get("is_causal")) is None:
        is_causal = getattr(module, "is_causal", True)
    # Without pop: after it torch.compile has no guard on what else is in `options`, and reuses a graph without
    # segments.
    known = {name: options[name] for name in _KEYWORDS if name in options}
    others = {name: value for name, value in options.items() if name not in known and name != "is_causal"}
    if "segments" not in known:
        known |= getattr(known.get("position_ids"), "_odc_pack", {})
    chosen, split = others.get("indices"), getattr(module, "_odc_split", None)
    if chosen is not None and (split is not None or any(known.get("segments") or ())):
        raise NotImplementedError(
            f"{type(module).__name__} chooses keys by an indexer, which does not see those of other ranks or samples: "
            f"train it on unsplit samples, without shared prefixes"
        )
    if chosen is not None and mask is not None:
        mask, _ = _of_chosen(mask, others.pop("indices")), known.pop("cu_seq_lens_q", None)  # `mask` has documents
    call = _Call(
        module=module, query=query, key=key, value=value, mask=mask, is_causal=is_causal, others=others, **known
    )
    if split is not None:
        split.on_attention(module, key, value, call.segments)
    return _attend(call), None


_outside_of_graphs = torch._disable_dynamo(_packed_attention)


def _of_chosen(mask: Tensor, indices: Tensor) -> Tensor:
    """`mask`, [B, 1, T, keys], without the keys that are not among a query's `indices`, which may name masked ones."""
    chosen = torch.zeros_like(mask, dtype=torch.bool).scatter(-1, indices[:, None].long(), True)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _attend(call: _Call) -> Tensor:
    if not call.has_segments and not (call.may_be_pack and call.length > 1):
        if call.image_blocks:
            raise ValueError(f"{type(call.module).__name__} was given image_blocks, which are of a pack, with a mask")
        _refuse_leak(call)
        return _by_eager(call) if call.need_eager else _by_library(call)
    _check_pack(call)
    if call.has_segments:
        out = _of_segments(call)
    else:
        ends = _ends(call)
        out = _of_rows(call) if ends is None else _of_documents(call, ends)
    return _with_blocks(call, out) if call.image_blocks else out


def _refuse_leak(call: _Call) -> None:
    """Raises ValueError if this call, which does not separate documents, has several in a row.

    A restart of the positions that no query can see across is padding, or the caller's own block mask.
    """
    if call.length == 1 or call.length != call.key.shape[2]:
        return  # decoding, a cache, cross attention: a pack has none of them
    positions, mask = call.position_ids, call.mask
    seen = call.cu_seq_lens_q is not None and len(call.cu_seq_lens_q) - 1 > call.batch
    if not seen and positions is not None and positions.ndim == 2 and positions.shape[1] == call.length:
        leak = positions.diff(dim=-1) != 1  # [1 or B, T - 1]
        if mask is not None:
            allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            itself = allowed.diagonal(dim1=-2, dim2=-1)[..., 1:]  # False where a query is padding
            leak = leak[:, None] & itself & allowed.diagonal(offset=-1, dim1=-2, dim2=-1)
        seen = bool(leak.any())
    if seen:
        how = "without causal attention" if mask is None else "with an attention_mask that joins them"
        raise ValueError(_JOINED.format(type(call.module).__name__, how))


def _check_pack(call: _Call) -> None:
    """Raises if a pack's call has an argument that would be dropped, or no documents' bounds."""
    name = type(call.module).__name__
    if call.has_segments and not (call.may_be_pack and call.batch == 1):
        raise ValueError(f"{name} was given parts of samples with a mask or a cache, or without causal attention")
    for argument in _UNSUPPORTED_IN_PACKS:
        if call.others.get(argument) is not None:
            raise PackingUnsupported(f"{name} uses `{argument}`, which a pack drops. {REMEDY}")
    if call.position_ids is None and call.cu_seq_lens_q is None:
        raise PackingUnsupported(
            f"{name} passes neither position_ids nor cu_seq_lens_q to its attention, so documents can't be kept apart. "
            f"{REMEDY}"
        )


def _with_blocks(call: _Call, out: Tensor) -> Tensor:
    """`out`, [1, T, H, D], with other rows of the images' tokens: they see their whole image."""
    parts, done = [], 0
    for first, start, stop in call.image_blocks:
        keys, values = (each[:, :, first:stop] for each in (call.key, call.value))
        parts += [out[:, done:start], of_document(call.query[:, :, start:stop], keys, values, call, causal=False)]
        done = stop
    return torch.cat([*parts, out[:, done:]], dim=1)


def _by_library(call: _Call) -> Tensor:
    options = {"dropout": call.dropout, "scaling": call.scaling, "is_causal": call.is_causal} | call.others
    return sdpa_attention_forward(call.module, call.query, call.key, call.value, call.mask, **options)[0]


def _by_eager(call: _Call) -> Tensor:
    mask = call.mask
    if mask is None and call.is_causal and call.length > 1:
        # Aligned to the upper left, as SDPA's `is_causal`: a static cache's unused tail is hidden.
        mask = call.query.new_ones(call.length, call.key.shape[2], dtype=torch.bool).tril()
    return eager(call.query, call.key, call.value, mask, call).transpose(1, 2).contiguous()


def _ends(call: _Call) -> Tensor | None:
    """The documents' bounds in the rows laid end to end, from 0 to B * T; None if each row is one document."""
    batch, length, positions = call.batch, call.length, call.position_ids
    if call.cu_seq_lens_q is not None:
        return None if batch == 1 and call.max_length_q == length else call.cu_seq_lens_q
    assert positions is not None, "`_check_pack` requires one of the two"
    shape = list(positions.shape)
    if shape not in ([1, length], [batch, length]):
        raise ValueError(f"position_ids must be [{batch}, {length}] or [1, {length}], not {shape}.")
    restarts = positions.diff(dim=-1) != 1
    if not restarts.any():
        return None
    starts = F.pad(restarts, (1, 0), value=True).expand(batch, length).flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=batch * length)


def _of_rows(call: _Call) -> Tensor:
    """Each row is one document."""
    if call.sliding_window is not None and call.fit_kernel(call.query, call.value):
        # SDPA would need a mask for the window; the kernel does not.
        past, length = (call.batch + 1) * call.length, call.length
        ends = torch.arange(0, past, length, dtype=torch.int32, device=call.query.device)
        return _by_kernel(call, ends, length)
    return one_length(call.query, call.key, call.value, call).transpose(1, 2).contiguous()


def _of_documents(call: _Call, ends: Tensor) -> Tensor:
    """A row may hold several documents."""
    if call.fit_kernel(call.query, call.value):
        return _by_kernel(call, ends, call.max_length_q)
    bounds = bounds_on_host(ends, call.batch * call.length)
    qkv = [x.transpose(0, 1).flatten(1, 2)[None] for x in (call.query, call.key, call.value)]  # [1, heads, B * T, D]
    parts = [one_length(*(x[:, :, at:end] for x in qkv), terms=call) for at, end in pairwise(bounds) if end > at]
    return torch.cat(parts, dim=2)[0].unflatten(1, (call.batch, call.length)).permute(1, 2, 0, 3).contiguous()


def _by_kernel(call: _Call, ends: Tensor, longest: int | None) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value))  # [B * T, heads, D]
    return varlen(q, k, v, ends, longest, call).unflatten(0, (call.batch, call.length))


@torch._disable_dynamo  # its exchange with other ranks must run in every forward, not once during tracing
def _of_segments(call: _Call) -> Tensor:
    """One row of documents, some of them segments of samples, which see other rows of the pack or of other ranks."""
    name, ends, segments = type(call.module).__name__, call.cu_seq_lens_q, call.segments or ()
    split: LayerSplit | None = getattr(call.module, "_odc_split", None)
    if call.dropout:
        raise PackingUnsupported(f"{name} has attention dropout, which is not supported for segments of samples")
    if ends is None:
        raise PackingUnsupported(f"{name} does not pass cu_seq_lens_q to its attention. {REMEDY}")
    bounds, window = bounds_on_host(ends, call.length), call.sliding_window
    query, key, value = call.query, call.key, call.value
    if len(bounds) - 1 != len(segments):
        raise ValueError(f"the pack has {len(bounds) - 1} documents and segments for {len(segments)}")
    plan = None if split is None else split.exchange.plan
    spans = split.exchange.spans(bounds, segments) if split is not None and plan else []
    runs = split.runs(spans, window) if split is not None and spans else []
    try:
        seen = rows_before(bounds, segments, plan=plan, runs=runs, window=window)
    except ValueError as error:
        give = "minibatch(model, tokens=…, split=packs.split), or to evaluate split_forward(model, packs.split)"
        how = "call enable_split(model, tokens=…) after fully_shard" if split is None else f"give the plan, {give}"
        raise RuntimeError(f"{error}. If other packs have them, {how}") from None
    before = None
    if split is not None and spans:
        key, value = split.publish((key, value), spans, window)
        before = RowsOfOthers(split, spans, runs, window, (key.dtype, value.dtype)) if runs else None
    plain = window is None and not call.need_eager
    if plain and (call.fit_kernel(query, value) or takes(query, key, value)):
        attend = FlashAttentionOfTree if call.fit_kernel(query, value) else AttentionOfTree
        return attend.apply(query, key, value, parts_of(bounds, seen), call.scaling, before).transpose(1, 2)
    joined = partial(_joined, call, bounds, seen)
    if before is None:
        return joined(query, key, value, call.s_aux)
    return AttentionOfJoined.apply(joined, before, query, key, value, call.s_aux)


def _joined(
    call: _Call,
    bounds: Sequence[int],
    seen: Sequence[Sequence[SeenRows]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *before: Tensor,
) -> Tensor:
    """Document by document, its keys and values joined with those that it sees before them. Those that see none run in
    one call of the variable-length kernel.
    """
    call, sources = replace(call, s_aux=sinks), (key, value, *before)
    parts, fits = [], call.fit_kernel(query, value)
    for _, run in groupby(range(len(seen)), lambda at: -1 if fits and not seen[at] else at):
        first, *others = run
        past = first + len(others) + 1
        start, end = bounds[first], bounds[past]
        rows = (*seen[first], SeenRows(0, start, end))
        q = query[:, :, start:end]
        k, v = (torch.cat([sources[2 * at + kind][:, :, low:high] for at, low, high in rows], 2) for kind in (0, 1))
        if others:
            assert call.cu_seq_lens_q is not None, "`_of_segments` requires it"
            longest = max(end - start for start, end in pairwise(bounds[first : past + 1]))
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            parts.append(varlen(q, k, v, call.cu_seq_lens_q[first : past + 1] - start, longest, call)[None])
        else:
            parts.append(of_document(q, k, v, call))
    return torch.cat(parts, dim=1)
