"""One layer's side of an exchange, as autograd sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..balance.pieces import Piece
from ..engine.passes import in_backward_pass
from .exchange import SequenceExchange, Span
from .fetched import Fetched
from .tree import RemoteRows

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, heads, tokens, D]


class AttentionHook:
    """The object at an attention module's `_odc_split`, which each call of its attention calls first."""

    def on_attention(
        self, module: nn.Module, keys: torch.Tensor, values: torch.Tensor, pieces: Sequence[Piece | None] | None
    ) -> None:
        """`pieces`: None if the module does not pass them on."""


class LayerSplit(AttentionHook):
    """The calls of a layer's attention."""

    def __init__(self, exchange: SequenceExchange, layer: int) -> None:
        self.exchange, self.layer = exchange, layer
        self.fetched: list[Fetched | None] = []  # in the forward that runs now
        self.is_recomputed = False  # the backward that runs now has fetched already

    def publish(self, keys: torch.Tensor, values: torch.Tensor, spans: list[Span], window: int | None) -> Pair:
        """Passes keys and values [1, heads, T, D] through."""
        if not in_backward_pass():  # a recomputation finds its rows written
            self.exchange.start(self.layer, spans, trains=keys.requires_grad or values.requires_grad)
            rows = by_token(keys.detach()), by_token(values.detach())
            self.exchange.publish(self.layer, spans, window, rows)
        return _Publish.apply(self, spans, window, keys, values)

    def fetch(
        self, keys: torch.Tensor, values: torch.Tensor, spans: list[Span], runs: list[RemoteRows], window: int | None
    ) -> tuple[torch.Tensor, ...]:
        """For each run of rows on other ranks, which the spans read, their keys and values. See `ready`."""
        self.fetched = []
        return _Fetch.apply(self, spans, runs, window, keys, values)

    def ready(self) -> None:
        """From here on the current stream finds what was fetched."""
        for each in self.fetched:
            each.finish()

    def release(self, out: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Frees what was fetched until the backward, after the attention. Passes its output `out` through."""
        fetched, self.fetched = self.fetched, []
        if not fetched:
            return out
        self.is_recomputed = in_backward_pass()  # then its backward follows at once
        if not self.is_recomputed:
            for each in fetched:
                each.free()
        if torch.is_grad_enabled() and out.requires_grad:
            if not self.is_recomputed:
                self.exchange.released.append(fetched)
            out = _Release.apply(self, fetched, out, keys)
        return out


def by_token(each: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] as [T, heads, D]."""
    return each[0].transpose(0, 1)


def by_head(each: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] as [1, heads, T, D]."""
    return each.transpose(0, 1)[None]


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, side: LayerSplit, spans: list[Span], window: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> Pair:
        ctx.side, ctx.spans, ctx.window = side, spans, window
        ctx.set_materialize_grads(False)
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rows = [None if each is None else by_token(each) for each in gradients]
        found = ctx.side.exchange.collect(ctx.side.layer, ctx.spans, ctx.window, rows)
        return None, None, None, *(None if each is None else by_head(each) for each in found)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        side: LayerSplit,
        spans: list[Span],
        runs: list[RemoteRows],
        window: int | None,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.side, ctx.spans, ctx.runs, ctx.window = side, spans, runs, window
        ctx.set_materialize_grads(False)
        dtypes = keys.dtype, values.dtype  # autocast may compute in another than the buffers'
        out: list[torch.Tensor] = []
        for run in runs:
            found = side.exchange.read(side.layer, spans, run, dtypes)
            if isinstance(found, Fetched):
                side.fetched.append(found)
                found = found.rows
            out += [by_head(each).to(dtype) for each, dtype in zip(found, dtypes, strict=True)]
        ctx.fetched = side.fetched
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rows = [None if each is None else by_token(each).contiguous() for each in gradients]
        for each in ctx.fetched:
            each.free()
        ctx.side.exchange.add(ctx.side.layer, ctx.spans, ctx.runs, ctx.window, rows)
        return (None,) * 6


class _Release(torch.autograd.Function):
    """Between an attention and what follows it: its backward comes before the attention's, and fetches again."""

    @staticmethod
    def forward(
        ctx: Any, side: LayerSplit, fetched: list[Fetched], out: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        ctx.side, ctx.fetched = side, fetched
        ctx.save_for_backward(keys)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # a checkpoint computes the layer again now, at the latest
        if not ctx.side.is_recomputed:
            for each in ctx.fetched:
                each.finish()
            ctx.side.exchange.fetch_ahead(ctx.fetched)
        ctx.side.is_recomputed = False
        return None, None, gradient, None
