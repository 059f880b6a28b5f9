"""Attention of documents that see rows before their own, without a mask and without joining them in memory.

    a = softmax over the keys before, all visible;  b = causal softmax over the document's keys
    lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Each part's backward takes the joined `out` and `lse`, as its weights are exp(scores - lse): the parts' gradients are
those of one attention over all keys (FlashAttention, arXiv 2205.14135, Algorithm 4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, cycle, pairwise
from typing import Any, NamedTuple

import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, Hkv, tokens, D]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SeenRows(NamedTuple):
    """Rows `low` up to, not including, `high` of a source: 0 is the pack itself, n the n-th other one."""

    source: int
    low: int
    high: int


class AttentionPart(NamedTuple):
    """The queries of rows `start` up to, not including, `end` attend to the rows `low` up to `high` of `source`.

    Causally if these are their own rows, else every query to all of them. `source`: see `SeenRows`.
    """

    start: int
    end: int
    source: int
    low: int
    high: int

    @property
    def is_own(self) -> bool:
        return self.source == 0 and self.low == self.start


def parts_of(bounds: Sequence[int], seen: Sequence[Sequence[SeenRows]]) -> list[AttentionPart]:
    """The parts of a pack's attention: those of the documents on their own rows, then, with `seen`, for each document
    the rows that it sees before its own, the others. Documents side by side that see the same rows share a part, so
    that these rows' gradient is computed once.
    """
    parts = [AttentionPart(start, end, 0, start, end) for start, end in pairwise(bounds)]
    last: dict[SeenRows, int] = {}
    for (start, end), rows in zip(pairwise(bounds), seen, strict=True):
        for each in rows:
            at = last.get(each)
            if at is not None and parts[at].end == start:
                parts[at] = parts[at]._replace(end=end)
            else:
                last[each] = len(parts)
                parts.append(AttentionPart(start, end, *each))
    return parts


class RowsBefore(ABC):
    """Keys and values of other packs, which an attention reads in its forward, and again in its backward."""

    @abstractmethod
    def each(self, *, backward: bool = False) -> Iterator[tuple[int, Pair]]:
        """The sources from 1 on, with their keys and values, which are valid until the next one is asked for."""

    @abstractmethod
    def add(self, gradients: Iterable[tuple[int, Sequence[torch.Tensor]]], needed: Sequence[bool]) -> None:
        """Takes the sources' gradients, which come one after another. `needed`: of keys, of values."""


def sources(keys: torch.Tensor, values: torch.Tensor, before: RowsBefore | None) -> Iterator[tuple[int, Pair]]:
    """A pack's own keys and values, then, in a forward, those before them."""
    yield 0, (keys, values)
    if before is not None:
        yield from before.each()


class AttentionOfTree(torch.autograd.Function):
    """query [1, H, T, D], keys and values [1, Hkv, T, D] of a pack, on a CPU. `before`: the further sources, whose
    gradients it adds.

    Saved: what goes in, `out` and `lse`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        parts: Sequence[AttentionPart],
        scale: float | None,
        before: RowsBefore | None,
    ) -> torch.Tensor:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        if query.dtype == torch.float64:
            lse = lse.double()
        for source, pair in sources(keys, values, before):
            for part in (each for each in parts if each.source == source):
                rows = (each[:, :, part.low : part.high] for each in pair)
                more, theirs = _forward(query[:, :, part.start : part.end], *rows, 0.0, part.is_own, scale=scale)
                mine, weights = out[:, :, part.start : part.end], lse[:, :, part.start : part.end]
                if not part.is_own:
                    joined = torch.logaddexp(weights, theirs)
                    more = mine * (weights - joined).exp()[..., None] + more * (theirs - joined).exp()[..., None]
                    theirs = joined
                mine.copy_(more)
                weights.copy_(theirs)
        ctx.save_for_backward(query, keys, values, out, lse)
        ctx.parts, ctx.scale, ctx.before = parts, scale, before
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys, values, out, lse = ctx.saved_tensors
        of_query = torch.zeros_like(query)

        def gradients(source: int, pair: Pair) -> list[torch.Tensor]:
            found = [torch.zeros_like(each) for each in pair]
            for part in (each for each in ctx.parts if each.source == source):
                own = (..., slice(part.start, part.end), slice(None))
                theirs = (..., slice(part.low, part.high), slice(None))
                given = (gradient[own], query[own], *(each[theirs] for each in pair), out[own])
                of_part = _backward(*given, lse[..., part.start : part.end], 0.0, part.is_own, scale=ctx.scale)
                for place, each in zip((of_query[own], *(x[theirs] for x in found)), of_part, strict=True):
                    place += each
            return found

        of_own = gradients(0, (keys, values))
        if ctx.before is not None:
            pairs = ctx.before.each(backward=True)
            ctx.before.add(((number, gradients(number, pair)) for number, pair in pairs), ctx.needs_input_grad[1:3])
        return of_query, *of_own, None, None, None


class AttentionOfJoined(torch.autograd.Function):
    """Any attention of a pack, `attend(query, keys, values, sinks or None, *copies of the rows before)`.

    The backward reads them again, and attends again: nothing but what goes in is saved.
    """

    @staticmethod
    def forward(
        ctx: Any, attend: Callable[..., torch.Tensor], before: RowsBefore, q: torch.Tensor, *given: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.attend, ctx.before = attend, before
        kind = q.device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        ctx.save_for_backward(q, *given)
        return attend(q, *given, *(each.clone() for _, pair in before.each() for each in pair))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        rows = [each.clone() for _, pair in ctx.before.each(backward=True) for each in pair]
        given = [None if each is None else each.detach() for each in (*ctx.saved_tensors, *rows)]
        needs = chain(needed, cycle(needed[1:3]))
        leaves = [each for each, need in zip(given, needs, strict=False) if need and each is not None]
        for each in leaves:
            each.requires_grad_()
        with torch.enable_grad(), torch.autocast(gradient.device.type, **ctx.autocast):
            out = ctx.attend(*given)
        found = torch.autograd.grad(out, leaves, gradient, materialize_grads=True)
        by_leaf = dict(zip(map(id, leaves), found, strict=True))
        gradients = [by_leaf.get(id(each)) for each in given]
        ctx.before.add(enumerate(zip(gradients[4::2], gradients[5::2], strict=True), 1), needed[1:3])
        return None, None, *gradients[:4]


def by_token(each: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] as [T, heads, D]."""
    return each[0].transpose(0, 1)


def by_head(each: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] as [1, heads, T, D]."""
    return each.transpose(0, 1)[None]


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True if `AttentionOfTree` can compute it. Not under autocast, which knows SDPA and not its parts."""
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and alike and not torch.is_autocast_enabled("cpu")
