"""Attention over packed sequences for transformers models, and the loss that goes with it.

A *pack* is several documents side by side in one row, without padding: `input_ids`, `position_ids` (int64,
shape [1, T]; positions restart at every document) and `labels` (int64, [1, T]; -100 where nothing is to be
predicted, hence at the first token of every document, which no earlier token may predict).

`enable_packing` registers `packed_attention` (transformers' `AttentionInterface`) and `packed_mask` (its
`AttentionMaskInterface`). No mask over the whole pack is ever made; attention costs the sum of the documents'
squares, not the pack's square. It runs `torch.nn.attention.varlen` on CUDA where that has a kernel, and SDPA
once per document elsewhere.

[Note: what is not a pack] The same model must still generate, evaluate padded batches, and run any non-causal
or cross attention that it has. Those get the library's own mask and its SDPA. What would let one document see
another, or would drop an argument, raises instead.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

__all__ = [
    "PackingUnsupported",
    "enable_packing",
    "model_inputs",
    "packed_attention",
    "packed_mask",
    "summed_loss",
]

ATTENTION_NAME = "odc_packed"
IGNORED_LABEL = -100

# Keyword arguments that change attention's result and that a pack does not support.
_UNSUPPORTED_IN_PACKS = ("position_bias", "sinks", "indices", "block_indices", "cache")
_PACK_INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_REMEDY = "Train it with one sequence per microbatch (packing off)."


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
            raise PackingUnsupported(f"its causal mask has an overlay that a pack would drop. {_REMEDY}")
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
    """What a call of attention asks for beside q, k, v."""

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
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document (transformers' `AttentionInterface`).

    Shapes: query [B, H, T, D], key and value [B, Hkv, T, D] with H a multiple of Hkv; result [B, T, H, D].

    Documents begin at every row, and where `position_ids` ([1, T] or [B, T]) does not go up by one. Or they
    are `cu_seq_lens_q` (int, [documents + 1], from 0 to B * T, over the rows laid end to end), which wins. On
    CUDA, reading position ids waits for the device in every layer; cumulative lengths with `max_length_q`
    (tokens of the longest document) do not. Keys have the queries' documents.

    `sliding_window` (tokens a query sees, itself included), `softcap`, `s_aux` (one sink logit per head, [H])
    and `dropout` are honoured. Calls that are no pack (a cache, a mask, no causality) go to the library's
    SDPA: [Note: what is not a pack].

    Raises PackingUnsupported where the model is not fit for packs (no boundaries given, an argument that
    would be dropped), ValueError where the inputs are not (documents in a row under a mask that joins them).
    """
    batch, length = query.shape[0], query.shape[2]
    terms = _Terms(scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap, sinks=s_aux)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not (causal and attention_mask is None and length == key.shape[2] and length > 1):
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
            raise PackingUnsupported(f"{type(module).__name__} uses `{name}`, which a pack drops. {_REMEDY}")
    if position_ids is None and cu_seq_lens_q is None:
        raise PackingUnsupported(
            f"{type(module).__name__} hands neither position_ids nor cu_seq_lens_q to its attention, so "
            f"documents can't be kept apart. {_REMEDY}"
        )
    ends = _cumulative_lengths(position_ids, cu_seq_lens_q, batch, length)
    if ends is None and _has_varlen_kernel(query, value, terms) and sliding_window is not None:
        # SDPA would need a mask for the window; the kernel does not.
        ends, max_length_q = torch.arange(0, (batch + 1) * length, length), length
    if ends is None:  # every row is one document
        return _one_length(query, key, value, terms).transpose(1, 2).contiguous(), None
    if _has_varlen_kernel(query, value, terms):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * T, heads, D]
        return _varlen(q, k, v, ends, max_length_q, terms).unflatten(0, (batch, length)), None

    bounds = ends.tolist()
    if bounds[0] != 0 or bounds[-1] != batch * length or bounds != sorted(bounds):
        raise ValueError(f"cu_seq_lens_q must rise from 0 to B * T = {batch * length}, but is {bounds}.")
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))  # [1, heads, B * T, D]
    parts = [
        _one_length(*(x[:, :, start:end] for x in (q, k, v)), terms) for start, end in pairwise(bounds) if end > start
    ]
    return torch.cat(parts, dim=2)[0].unflatten(1, (batch, length)).permute(1, 2, 0, 3).contiguous(), None


def _refuse_leak(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
) -> None:
    """Raises ValueError if this call, which keeps no documents apart, has several in a row.

    A restart of the positions that nobody can see across is padding, or the caller's own block mask.
    """
    length = query.shape[2]
    if length == 1 or length != key.shape[2]:
        return  # decoding, a cache, cross attention: a pack has none of them
    seen = cu_seq_lens_q is not None
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
    """Causal attention of B documents of L tokens, [B, H, L, D]. The largest mask made is [L, L]."""
    length = query.shape[2]
    windowed = terms.window is not None and terms.window < length
    mask = None
    if windowed or terms.need_eager:
        mask = query.new_ones(length, length, dtype=torch.bool).tril()
        if windowed:
            mask = mask.triu(1 - terms.window)
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
    """softmax(cap(q kᵀ * scaling) + mask, with sinks) v, softmax in fp32: what SDPA has no argument for.

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
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, longest: int | None, terms: _Terms
) -> Tensor:
    """Documents laid end to end, [tokens, heads, D], by the variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    ends = cu_seq_lens.to(device=query.device, dtype=torch.int32)
    longest = int(cu_seq_lens.diff().max() if longest is None else longest)
    gqa = {}
    if (groups := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            gqa["enable_gqa"] = True
        else:  # an older torch
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    # The kernel counts the tokens before a query's own; (-1, 0) is plain causal.
    before = -1 if terms.window is None or terms.window >= longest else terms.window - 1
    options = {"scale": terms.scaling, "window_size": (before, 0)} | gqa
    return varlen_attn(query, key, value, ends, ends, longest, longest, **options)


@dataclass(kw_only=True)
class _Seen:
    """What a probe forward of several documents saw."""

    document: Tensor  # [T]: the document that each token belongs to
    layers: set[int] = field(default_factory=set)  # ids of the modules that called the attention
    odd_masks: int = 0
    mask_windows: set[int] = field(default_factory=set)
    attention_windows: set[int] = field(default_factory=set)

    def attention(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        self.layers.add(id(module))
        if kwargs.get("sliding_window") is not None:
            self.attention_windows.add(kwargs["sliding_window"])
        return packed_attention(module, *args, **kwargs)

    def mask(self, **kwargs: Any) -> Tensor | None:
        token = torch.arange(len(self.document), device=self.document.device)
        behind = token[:, None] - token[None, :]
        same = self.document[:, None] == self.document[None, :]
        expected = same & (behind >= 0)
        if (window := kwargs.get("local_size")) is not None:
            self.mask_windows.add(window)
            expected &= behind < window
        library = sdpa_mask(**kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        # Only within documents: some models (GPT-OSS) make masks that join a pack's documents, ours to part.
        self.odd_masks += not torch.equal(library[0, 0] & same, expected)
        return packed_mask(**kwargs)

    def complaint(self, layers: int) -> str | None:
        if not self.layers:
            return "it never called the attention function that it was given"
        if len(self.layers) < layers:
            return f"only {len(self.layers)} of its {layers} layers called the attention function"
        if self.odd_masks:
            return "its mask is not plain causal (or causal with a sliding window) within a document"
        if dropped := self.mask_windows - self.attention_windows:
            return f"its masks have windows or chunks of {sorted(dropped)} tokens; its attention is not told"
        return None


def enable_packing(model: nn.Module) -> None:
    """Makes a transformers causal LM attend within the documents of a pack, after proving that it does.

    Call it on the plain model, before `fully_shard`, with real weights (not on the meta device). Probe
    forwards of 12 tokens, in eval mode, without gradients and with the random state kept, show that every
    layer calls `packed_attention` with the documents' boundaries, that a document's logits do not change with
    its neighbour's tokens, and (for fp32 weights) that they are what the model's former attention gives for
    it alone. State-space, linear-attention and convolution mixers carry state across documents: refused.

    Raises PackingUnsupported where that is not so; the model then has its former attention again.
    """
    name = type(model).__name__
    if not hasattr(model, "set_attn_implementation"):
        raise PackingUnsupported(f"{name} is no transformers model with a settable attention. {_REMEDY}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PackingUnsupported(f"{name} is on the meta device, where no probe runs: load its weights first.")
    former = _implementations(model.config)
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            _probe(model, device)
    except Exception as error:
        model.set_attn_implementation(former)
        known = isinstance(error, PackingUnsupported)
        reason = str(error) if known else f"the probe raised {error!r}. {_REMEDY}"
        raise PackingUnsupported(f"{name} can't be trained on packs: {reason}") from error
    finally:
        _register(packed_attention, packed_mask)
        for module in training:
            module.training = True


def _probe(model: nn.Module, device: torch.device) -> None:
    """Leaves `model` on our attention; raises PackingUnsupported if documents are not kept apart by it."""
    first, second = 5, 7  # tokens of the two documents
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, first + second), generator=generator).to(device)
    other = ids.clone()
    other[:, :first] = (ids[:, :first] + 1) % vocabulary
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None].to(device)

    def logits(ids: Tensor, positions: Tensor) -> Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()

    # 16-bit arithmetic differs between a pack and a document alone, and may route tokens to other experts.
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    tolerance = 1e-4 if exact else 2e-2
    documents = (slice(0, first), slice(first, None))
    alone = [logits(ids[:, part], positions[:, part]) for part in documents] if exact else []

    seen = _Seen(document=torch.tensor([0] * first + [1] * second, device=device))
    _register(seen.attention, seen.mask)
    model.set_attn_implementation(ATTENTION_NAME)
    packed, changed = logits(ids, positions), logits(other, positions)
    complaint = seen.complaint(model.config.get_text_config().num_hidden_layers)
    scale = packed.abs().max()
    # Negated comparisons, so that NaN complains too.
    if complaint is None and not (packed - changed)[:, first:].abs().max() <= tolerance * scale:
        complaint = "a document's logits changed when only its neighbour's tokens did"
    if complaint is None and exact and not (packed - torch.cat(alone, dim=1)).abs().max() <= 1e-3 * scale:
        complaint = "its logits in a pack are not those of each document alone"
    if complaint is not None:
        raise PackingUnsupported(f"{complaint}. {_REMEDY}")


def _register(attention: Callable, mask: Callable) -> None:
    """Puts the functions behind ATTENTION_NAME, in place of any that stand there."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)


def _implementations(config: Any) -> str | dict[str, Any]:
    """The attention of a config and of those within it, as `set_attn_implementation` takes them."""
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    if not parts:
        return config._attn_implementation
    return {"": config._attn_implementation} | {key: _implementations(part) for key, part in parts.items()}


def model_inputs(pack: Mapping[str, Any]) -> dict[str, Any]:
    """What a training forward of `pack` is called with.

    Its ids and positions; its cumulative lengths, where it has them (`cu_seq_lens_q`, `max_length_q`, ... as
    transformers names them); and no cache, which would hold every layer's keys and values for nothing.
    """
    return {name: pack[name] for name in _PACK_INPUTS if name in pack} | {"use_cache": False}


def summed_loss(model: nn.Module, pack: Mapping[str, Any]) -> Tensor:
    """Cross-entropy summed over the pack's target tokens, a scalar in fp32; 0 where it has none.

    Token t is predicted from position t - 1; labels of -100 are no targets. Divide by the *global* number of
    targets before `backward()`. The head runs on the predicting positions only, where the model's forward
    takes `logits_to_keep` (transformers' causal LMs do): logits then cost memory by target, not by token.

    A pack of several documents needs `enable_packing(model)` first; a single document does not.

    Raises ValueError if `labels` is not [1, T].
    """
    labels = pack["labels"]
    if labels.ndim != 2 or labels.shape[0] != 1:
        raise ValueError(f"A pack is one row, [1, T], but labels are {list(labels.shape)}: loop over the rows.")
    positions = (labels[0, 1:] != IGNORED_LABEL).nonzero().flatten()  # those that predict a target
    inner = getattr(model, "module", model)  # DistributedDataParallel hides the signature and passes all along
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        logits = model(**model_inputs(pack), logits_to_keep=positions).logits
    else:
        logits = model(**model_inputs(pack)).logits[:, positions]
    return F.cross_entropy(logits[0].float(), labels[0, positions + 1], reduction="sum")
