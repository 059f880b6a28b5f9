"""One layer's side of an exchange, as autograd sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..engine.unit import in_backward_pass
from ..plan.entries import Piece
from ..plan.pieces import Read
from .attention import Pair, RowsBefore, by_head, by_token
from .exchange import SequenceExchange, Span


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

    def publish(self, keys: torch.Tensor, values: torch.Tensor, spans: list[Span], window: int | None) -> Pair:
        """Passes keys and values [1, heads, T, D] through."""
        again = in_backward_pass()
        if not again:
            self.exchange.start(self.layer, spans, trains=keys.requires_grad or values.requires_grad)
        rows = by_token(keys.detach()), by_token(values.detach())
        self.exchange.publish(self.layer, spans, window, rows, again=again)
        return _Publish.apply(self, spans, window, keys, values)


class RowsOfOthers(RowsBefore):
    """The `runs` of other ranks that `spans` read, in `dtypes`: autocast may compute in others than the buffers'."""

    def __init__(
        self, side: LayerSplit, spans: list[Span], runs: list[Read], window: int | None, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._exchange, self._of = side.exchange, (side.layer, spans)
        self._runs, self._window, self._dtypes = runs, window, dtypes

    def each(self, *, backward: bool = False) -> Iterator[tuple[int, Pair]]:
        exchange = self._exchange
        if backward:
            exchange.require_written(*self._of)
        exchange.streams.go_on()
        reads = [exchange.read(*self._of, run, self._dtypes, backward=backward) for run in self._runs]
        reads[0].start()
        for number, read in enumerate(reads, 1):
            if number < len(reads):
                reads[number].start()  # beside what is computed on this one
            keys, values = read.finish()
            yield number, (by_head(keys), by_head(values))
            read.free()
        if not backward and not in_backward_pass():
            exchange.have_read(*self._of, self._runs)

    def add(self, gradients: Iterable[tuple[int, Sequence[torch.Tensor]]], needed: Sequence[bool]) -> None:
        if self._exchange.in_order or not any(needed):
            gradients = [*gradients]  # before it waits for others that add
        if not any(needed):
            return
        additions = self._exchange.begin_adding(*self._of, self._runs, self._window)
        for number, pair in gradients:
            found = [by_token(each) if need else None for each, need in zip(pair, needed, strict=True)]
            additions.add(self._runs[number - 1], found)
            del pair, found  # before the next run's are made
        additions.end()


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
