"""One layer's side of an exchange, as autograd sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.unit import in_backward_pass
from ..plan.entries import Segment
from ..plan.segments import Read
from .attention import Pair, RowsBefore, by_head, by_token
from .exchange import SequenceExchange, Span


class AttentionHook:
    """The object at an attention module's `_odc_split`, which each call of its attention calls first."""

    def on_attention(
        self, module: nn.Module, keys: torch.Tensor, values: torch.Tensor, segments: Sequence[Segment | None] | None
    ) -> None:
        """`segments`: None if the module does not pass them on."""


class RecurrentHook:
    """The object at a recurrent module's `_odc_split`."""

    def on_rows(self, module: nn.Module, inputs: torch.Tensor, rows: int) -> None:
        """`inputs`: [1, channels, T] of a convolution that needs `rows` rows before each."""

    def on_states(self, module: nn.Module, step: Callable[[], Pair]) -> None:
        """`step`: computes what becomes of a state, as (A, B)."""


class LayerSplit(AttentionHook):
    """The calls of a layer's attention."""

    def __init__(self, exchange: SequenceExchange, layer: int) -> None:
        self.exchange, self.layer = exchange, layer

    def publish(
        self, rows: Sequence[torch.Tensor], spans: list[Span], window: int | None = None, *passed: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Passes `rows`, such as keys and values [1, heads, T, D], through, and `passed`, whose gradients come before
        this rank waits for those of the rows.
        """
        again = in_backward_pass()
        if not again:
            self.exchange.start(self.layer, spans, trains=any(each.requires_grad for each in (*rows, *passed)))
        self.exchange.publish(self.layer, spans, window, tuple(by_token(each.detach()) for each in rows), again=again)
        return _Publish.apply(self, spans, window, len(rows), *rows, *passed)

    def runs(self, spans: list[Span], window: int | None = None) -> list[Read]:
        """All that these segments read of other ranks."""
        return self.exchange.runs(self.layer, spans, window)


@dataclass(frozen=True)
class RecurrentSplit(RecurrentHook):
    """Both sides of a recurrent layer. `states`: None for a convolution alone."""

    rows: LayerSplit
    states: LayerSplit | None


class RowsOfOthers(RowsBefore):
    """The `runs` of other ranks that `spans` read, in `dtypes`: autocast may compute in others than the buffers'."""

    def __init__(
        self, side: LayerSplit, spans: list[Span], runs: list[Read], window: int | None, dtypes: Sequence[torch.dtype]
    ) -> None:
        self._exchange, self._of = side.exchange, (side.layer, spans)
        self._runs, self._window, self._dtypes = runs, window, dtypes

    def each(self, *, backward: bool = False) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        exchange = self._exchange
        if backward:
            exchange.require_written(*self._of)
        exchange.streams.go_on()
        reads = [exchange.read(*self._of, run, self._dtypes, backward=backward) for run in self._runs]
        reads[0].start()
        for number, read in enumerate(reads, 1):
            if number < len(reads):
                reads[number].start()  # while attention computes on this one
            yield number, tuple(map(by_head, read.finish()))
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
        ctx: Any, side: LayerSplit, spans: list[Span], window: int | None, kinds: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.side, ctx.spans, ctx.window, ctx.kinds = side, spans, window, kinds
        ctx.set_materialize_grads(len(tensors) > kinds)  # rows of which only others make use have gradients there
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rows = [None if each is None else by_token(each) for each in gradients[: ctx.kinds]]
        found = ctx.side.exchange.collect(ctx.side.layer, ctx.spans, ctx.window, rows)
        of_rows = (None if each is None else by_head(each) for each in found)
        return None, None, None, None, *of_rows, *gradients[ctx.kinds :]
