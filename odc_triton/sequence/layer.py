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

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, heads, tokens, D]


class AttentionHook:
    """The object at an attention module's `_odc_split`, which each call of its attention calls first."""

    def on_attention(
        self, module: nn.Module, keys: torch.Tensor, values: torch.Tensor, pieces: Sequence[Piece | None] | None
    ) -> None:
        """`pieces`: None if the module does not pass them on."""


class LayerSplit(AttentionHook):
    """The calls of a layer's attention. `is_apart`: `fetch` gives all keys of a piece; else only those before it."""

    def __init__(self, exchange: SequenceExchange, layer: int) -> None:
        self.exchange, self.layer = exchange, layer
        self.is_apart = exchange.is_apart
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
        self, keys: torch.Tensor, values: torch.Tensor, spans: list[Span], window: int | None
    ) -> list[Pair | None]:
        """For each span the keys and values before it, followed by its own where memory is apart; None for a first
        piece.
        """
        self.fetched = []
        found = _Fetch.apply(self, spans, window, keys, values)
        return [None if found[at] is None else (found[at], found[at + 1]) for at in range(0, len(found), 2)]

    def release(self, out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """Frees what was fetched until the backward, after the attention. Passes its output `out` through."""
        fetched, self.fetched = self.fetched, []
        if not any(fetched):
            return out
        self.is_recomputed = in_backward_pass()  # then its backward follows at once
        if not self.is_recomputed:
            for each in filter(None, fetched):
                each.free()
        if torch.is_grad_enabled() and out.requires_grad:
            if not self.is_recomputed:
                self.exchange.released.append(fetched)
            out = _Release.apply(self, spans, fetched, out, keys, values)
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
        ctx: Any, side: LayerSplit, spans: list[Span], window: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.side, ctx.spans, ctx.window = side, spans, window
        ctx.set_materialize_grads(False)
        out: list[torch.Tensor | None] = []
        for span in spans:
            own = tuple(by_token(each)[span.first : span.end] for each in (keys, values))
            found = side.exchange.read(side.layer, span, window, own)
            side.fetched.append(found if isinstance(found, Fetched) else None)
            if found is None:
                out += [None, None]
            elif isinstance(found, Fetched):
                out += map(by_head, found.whole)
            else:  # autocast may compute in another dtype than the buffers'
                out += [by_head(each).to(mine.dtype) for each, mine in zip(found, own, strict=True)]
        ctx.fetched, ctx.shapes = side.fetched, (keys.shape, values.shape)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rows = [None if each is None else by_token(each).contiguous() for each in gradients]
        own: list[torch.Tensor | None] = [None, None]
        for at, (span, fetched) in enumerate(zip(ctx.spans, ctx.fetched, strict=True)):
            if fetched is None:
                continue
            fetched.free()
            for kind in (0, 1):
                if (whole := rows[2 * at + kind]) is None:
                    continue
                if own[kind] is None:
                    own[kind] = whole.new_zeros(ctx.shapes[kind])
                before = len(whole) - len(span.piece)
                by_token(own[kind])[span.first : span.end] = whole[before:]
                rows[2 * at + kind] = whole[:before]
        ctx.side.exchange.add(ctx.side.layer, ctx.spans, ctx.window, rows)
        return None, None, None, *own


class _Release(torch.autograd.Function):
    """Between an attention and what follows it: its backward comes before the attention's, and fetches again."""

    @staticmethod
    def forward(
        ctx: Any,
        side: LayerSplit,
        spans: list[Span],
        fetched: list[Fetched | None],
        out: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        ctx.side, ctx.spans, ctx.fetched = side, spans, fetched
        ctx.save_for_backward(keys, values)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = [
            by_token(each) for each in ctx.saved_tensors
        ]  # a checkpoint computes the layer again now, at the latest
        if not ctx.side.is_recomputed:
            for span, each in zip(ctx.spans, ctx.fetched, strict=True):
                if each is not None:
                    each.finish(tuple(whole[span.first : span.end] for whole in rows))
            ctx.side.exchange.fetch_ahead(ctx.fetched)
        ctx.side.is_recomputed = False
        return None, None, None, gradient, None, None
