"""A recurrent layer's two sides of an exchange over ranks.

[Note: rows, states] Such a layer is two in the exchange, in this order: the rows before each segment, which its
convolution needs, then the states of its recurrence. Each publishes what it has before it waits for others', so what
[Note: waves] in plan/segments.py says of layers holds for both: a segment's states need the rows before it, and no
state of another segment, as (A, B) are the same for any state that comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan.entries import Segment
from ..plan.segments import Read
from ..sequence.exchange import Span
from ..sequence.layer import LayerSplit, RowsOfOthers


class Others:
    """What one side of a layer takes from other ranks, after it has published its own."""

    def __init__(self, side: LayerSplit, spans: list[Span], dtypes: Sequence[torch.dtype], anchor: Tensor) -> None:
        """`anchor`: comes from what was published, so that the backward adds to others before it waits for them."""
        self._plan, self._runs, self._kinds = side.exchange.of(side.layer), side.runs(spans), len(dtypes)
        self._found: tuple[Tensor, ...] = ()
        if self._runs:
            before = RowsOfOthers(side, spans, self._runs, None, dtypes)
            self._found = _ReadOthers.apply(before, self._kinds, anchor)

    def of(self, segment: Segment) -> list[tuple[Tensor, ...]]:
        """For each read of `segment` its rows, [1, heads, rows, width], of each kind; none if it is not in the plan."""
        return [self._rows(read) for read in self._plan.reads(segment)] if self._plan.find(segment) is not None else []

    def _rows(self, read: Read) -> tuple[Tensor, ...]:
        of_holder = ((at, run) for at, run in enumerate(self._runs) if run.holder == read.holder)
        at, run = next((at, run) for at, run in of_holder if run.low <= read.low < run.high)
        found = self._found[at * self._kinds : (at + 1) * self._kinds]
        return tuple(each[:, :, read.low - run.low : read.high - run.low] for each in found)


class _ReadOthers(torch.autograd.Function):
    """Copies of what others have published; its backward adds the gradients to theirs."""

    @staticmethod
    def forward(ctx: Any, before: RowsOfOthers, kinds: int, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.before, ctx.kinds = before, kinds
        return tuple(rows.clone() for _, found in before.each() for rows in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        by_run = [gradients[at : at + ctx.kinds] for at in range(0, len(gradients), ctx.kinds)]
        ctx.before.add(enumerate(by_run, 1), [True] * ctx.kinds)
        return None, None, None
