"""Recurrent layers of transformers' models, which find in our functions what keeps a pack's documents apart.

Their forwards call functions of their modeling module by name: a causal convolution, and a recurrence. Each such module
gets a forward with the same code, that finds ours under these names while it computes a pack.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..base.environment import needs_transformers
from ..base.untyped import untyped
from ..plan.entries import Segment, bounds_on_host
from ..sequence.buffers import CUTS
from ..sequence.exchange import Span
from ..sequence.layer import RecurrentHook, RecurrentSplit
from .convolution import convolve_documents
from .documents import Document, documents_of
from .packages import Documents, Function, convolve, kernel_of
from .rules import DeltaRule, Rule, Scan
from .run import run_documents

_CONVOLUTION = "causal_conv1d_fn"
_OTHERS = ("mamba_selective_scan", "mamba_inner_fn")
_OLDEST = "5.17"  # of transformers, whose functions take other arguments before
_TRANSFORMERS = "5.23"  # from this version on every recurrent layer gets its model's keyword arguments


@dataclass(frozen=True)
class _RecurrentPack:
    """What our functions get in addition to transformers' arguments. `spans`: the segments of a plan over ranks."""

    module: nn.Module
    documents: Sequence[Document]
    split: RecurrentHook | None
    spans: list[Span]

    @classmethod
    def of(cls, module: nn.Module, bounds: list[int], segments: Sequence[Segment | None] | None) -> _RecurrentPack:
        if segments is not None and len(bounds) - 1 != len(segments):
            raise ValueError(f"the pack has {len(bounds) - 1} documents and segments for {len(segments)}")
        split = getattr(module, "_odc_split", None)
        exchange = split.rows.exchange if isinstance(split, RecurrentSplit) else None
        if exchange is None or exchange.plan is None or segments is None:
            return cls(module, documents_of(bounds, segments), split, [])
        documents = documents_of(bounds, segments, plan=exchange.plan, cuts=exchange.cuts, rank=exchange.rank)
        return cls(module, documents, split, exchange.spans(bounds, segments))


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward calls one of the functions."""
    return [each for each in model.modules() if any(_CONVOLUTION in _names(kind) for kind in type(each).__mro__)]


def most_cuts_of(models: Iterable[nn.Module | None], samples: int, wanted: int) -> int | None:
    """The `cuts` that a job gives `enable_split` if so many samples of a minibatch may have to be split. `wanted`: if
    it is not 0. None if no layer recurs.
    """
    recurs = any(recurrent_layers(model) for model in models if model is not None)
    return (wanted or max(CUTS, samples)) if recurs else None


def _code(kind: type) -> Any:
    """Its `forward`, without decorators."""
    return inspect.unwrap(getattr(kind, "forward", object))


def _names(kind: type) -> tuple[str, ...]:
    return getattr(getattr(_code(kind), "__code__", None), "co_names", ())


def separate_documents(model: nn.Module) -> None:
    """Gives the recurrent layers of `model` forwards that keep a pack's documents apart, and tells them where a pack
    has documents if only its positions do. Raises ValueError, naming it, for one that can't be told.
    """
    layers = recurrent_layers(model)
    made = []
    for module in layers:
        name, code = type(module).__name__, _code(type(module))
        if needs := needs_transformers(_OLDEST):
            raise ValueError(f"{name} {needs}")
        if others := [each for each in _OTHERS if each in _names(type(module))]:
            raise ValueError(f"{name} computes {others[0]}, whose state can't be kept within documents")
        own = vars(module).get("forward")
        if _CONVOLUTION not in _names(type(module)) or (own is not None and not _is_ours(own)):
            raise ValueError(f"{name} has a forward of its own, which can't be told of documents")
        if not any(each.kind is each.VAR_KEYWORD for each in inspect.signature(code).parameters.values()):
            raise ValueError(f"{name} can't be told of documents: install transformers {_TRANSFORMERS}")
        by_package = any(each.kernel is not None for each in _functions(code).values())
        made.append(partial(_forward, module, by_package=by_package))
    for module, forward in zip(layers, made, strict=True):
        untyped(module).forward = forward
    for part in _told(model) if layers else ():
        if find_documents not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(find_documents, with_kwargs=True)


def join_documents(model: nn.Module) -> None:
    """Undoes `separate_documents`."""
    for module in recurrent_layers(model):
        if _is_ours(vars(module).get("forward")):
            del module.forward
    for part in _told(model):
        for number, hook in [*part._forward_pre_hooks.items()]:
            if hook is find_documents:
                del part._forward_pre_hooks[number], part._forward_pre_hooks_with_kwargs[number]


def _told(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are called with positions: it may be called without its head, or its tower."""
    return [each for each in model.modules() if isinstance(each, PreTrainedModel) and recurrent_layers(each)]


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is _forward


def find_documents(model: nn.Module, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """A pre-hook of a model's forward: gives bounds of documents where only positions tell them."""
    every = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | given
    positions, mask = every.get("position_ids"), every.get("attention_mask")
    ids = every.get("input_ids") if every.get("inputs_embeds") is None else every["inputs_embeds"]
    if positions is None or ids is None or positions.shape[-1] == 1 or every.get("cu_seq_lens_q") is not None:
        return None
    if positions.ndim == 3 and len(positions) != 4:
        return None  # of time, height and width alone, which don't go on by 1 within a document
    if mask is not None and not (mask.ndim == 2 and bool(mask.all())):
        return None  # see [Note: what is not a pack] in packs/attention.py
    positions = positions[0] if positions.ndim == 3 else positions
    begins = F.pad(positions.diff(dim=-1) != 1, (1, 0), value=True)
    starts = begins.expand(len(ids), -1).flatten().nonzero().flatten()
    ends = F.pad(starts, (0, 1), value=begins.shape[-1] * len(ids)).int()
    longest = int(ends.diff().max())
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return args, given | bounds


def _forward(
    module: nn.Module,
    hidden_states: Tensor,
    *args: Any,
    cu_seq_lens_q: Tensor | None = None,
    segments: Sequence[Segment | None] | None = None,
    by_package: bool,
    **given: Any,
) -> Tensor:
    """In place of the module's own, which gets rows of one document each. `by_package`: it calls a package's functions,
    also where they don't run.
    """
    split = getattr(module, "_odc_split", None)
    has_segments = segments is not None and (any(segments) or not isinstance(split, RecurrentSplit | None))
    if has_segments or (cu_seq_lens_q is not None and not _are_rows(cu_seq_lens_q, *hidden_states.shape[:2])):
        return _of_pack(module, hidden_states, cu_seq_lens_q, segments, given)
    if by_package and not hidden_states.is_cuda:
        return _within_documents(_code(type(module)))(module, hidden_states, *args, **given)
    return type(module).forward(module, hidden_states, *args, **given)


def _functions(code: FunctionType) -> dict[str, Function]:
    called = {name: code.__globals__[name] for name in code.__code__.co_names if name in _OURS}
    return {name: Function(each, kernel_of(each)) for name, each in called.items()}


@torch._disable_dynamo
def _are_rows(ends: Tensor, rows: int, length: int) -> bool:
    """True if each row is one document."""
    if len(ends) != rows + 1:
        return False
    return rows == 1 or bounds_on_host(ends, rows * length) == [*range(0, rows * length + 1, length)]


@functools.cache
def _within_documents(code: FunctionType) -> FunctionType:
    """`code`, the forward of a module, with our functions under the names that it calls."""
    names = {name: partial(_OURS[name], each) for name, each in _functions(code).items()}
    made = FunctionType(code.__code__, code.__globals__ | names, code.__name__, code.__defaults__, code.__closure__)
    made.__kwdefaults__ = code.__kwdefaults__
    return made


@torch._disable_dynamo  # the documents differ in every forward
def _of_pack(
    module: nn.Module,
    hidden_states: Tensor,
    ends: Tensor | None,
    segments: Sequence[Segment | None] | None,
    given: dict[str, Any],
) -> Tensor:
    rows, length = hidden_states.shape[:2]
    bounds = [0, rows * length] if ends is None else bounds_on_host(ends, rows * length)
    # Nothing goes on from a pack's documents later.
    given = given | {
        name: None for name in ("cache_params", "past_key_values", "cache", "attention_mask") if name in given
    }
    forward, row = _within_documents(_code(type(module))), hidden_states.reshape(1, rows * length, -1)
    return forward(module, row, **given, odc_pack=_RecurrentPack.of(module, bounds, segments)).reshape(rows, length, -1)


def _convolution(
    function: Function,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    odc_pack: _RecurrentPack | None = None,
    **_: Any,
) -> Tensor:
    terms = {"weight": weight, "bias": bias, "activation": activation}
    convolution = partial(function.on(inputs.device), **terms)
    if odc_pack is None:
        return convolution(inputs)
    split, rows = odc_pack.split, weight.shape[-1] - 1
    if split is not None:
        split.on_rows(odc_pack.module, inputs, rows)
    side = split.rows if isinstance(split, RecurrentSplit) else None
    documents, spans = odc_pack.documents, odc_pack.spans
    is_apart = not spans and not any(each.reads for each in documents)
    if function.kernel and inputs.is_cuda and inputs.shape[1] % 8 == 0 and is_apart:
        lengths = [each.end - each.first for each in documents]
        return convolve(function.kernel, inputs, Documents.of(lengths, inputs.device), **terms)
    return convolve_documents(convolution, inputs, rows, documents, side, spans)


def _delta(
    function: Function, *inputs: Tensor, g: Tensor, beta: Tensor, odc_pack: _RecurrentPack | None = None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    if odc_pack is None:
        return function.on(inputs[0].device)(*inputs, g=g, beta=beta, **given)
    options = {name: given[name] for name in ("use_qk_l2norm_in_kernel",) if name in given}
    return _recurrence(DeltaRule(function, (*inputs, g, beta), options), odc_pack), None


def _scan(
    function: Function,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk_size: int,
    odc_pack: _RecurrentPack | None = None,
    **given: Any,
) -> Any:
    if odc_pack is None:
        return function.on(x.device)(x, dt, a, b, c, chunk_size=chunk_size, **given)
    options = {name: given[name] for name in ("D", "dt_bias", "dt_softplus", "dt_limit") if name in given}
    return _recurrence(Scan(function, (x, dt, b, c), a, chunk_size, options), odc_pack)


def _fused(*_: Any, **__: Any) -> None:
    """None: the module then calls the other functions."""


def _recurrence(rule: Rule, pack: _RecurrentPack) -> Tensor:
    split = pack.split
    if split is not None:
        split.on_states(pack.module, lambda: rule.affine(0, 1, None)[2])
    side = split.states if isinstance(split, RecurrentSplit) else None
    return run_documents(rule, pack.documents, side, pack.spans)


# By name in the modeling modules. One fused kernel of Mamba-2's convolution and scan can't be told what comes before.
_OURS = {
    _CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _fused,
}
