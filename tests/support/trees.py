"""Packs of documents that see rows of others, in the pack or fetched from other ranks; their attention by a mask."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odc_triton.sequence.attention import AttentionPart, Pair, RowsBefore, SeenRows, parts_of

HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Tree:
    """`documents`: how many rows each has, and the rows (source, low, high) that it sees besides; `before`: rows that
    each source from 1 on has.
    """

    documents: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]
    before: tuple[int, ...] = ()

    @property
    def bounds(self) -> list[int]:
        return [sum(rows for rows, _ in self.documents[:at]) for at in range(len(self.documents) + 1)]

    @property
    def parts(self) -> list[AttentionPart]:
        return parts_of(self.bounds, [[SeenRows(*rows) for rows in sees] for _, sees in self.documents])


class GivenRows(RowsBefore):
    """Keys and values, in turn, of each source besides the pack. Their gradients become `grad`."""

    def __init__(self, *before: Tensor) -> None:
        self.pairs = [*zip(before[::2], before[1::2], strict=True)]

    def each(self, *, backward: bool = False) -> Iterator[tuple[int, Pair]]:
        yield from enumerate(self.pairs, 1)

    def add(self, gradients: Iterable[tuple[int, Sequence[Tensor]]], needed: Sequence[bool]) -> None:
        for number, found in gradients:
            for leaf, each, need in zip(self.pairs[number - 1], found, needed, strict=True):
                leaf.grad = each.to(leaf.dtype) if need else None


A, B = (0, 0, 6), (0, 6, 9)
CASES = {
    "alone": Tree(((5, ()), (3, ()))),
    "a group": Tree(((6, ()), (3, (A,)), (4, (A,)), (2, (A,)))),
    "queries and keys between": Tree(((6, ()), (3, (A,)), (5, ()), (4, ((0, 9, 13),)), (2, ()))),
    "two levels": Tree(((6, ()), (3, (A,)), (4, (A, B)), (2, (A, B)), (3, (A,)))),
    "queries of one row": Tree(((6, ()), (3, ()), (1, (A,)), (2, ()), (1, ((0, 9, 10),)))),
    "fetched": Tree(((4, ((1, 0, 7),)), (3, ((1, 0, 7), (0, 0, 4))), (2, ((2, 3, 4),))), before=(9, 5)),
    "fetched after the pack's": Tree(((6, ()), (3, (A,)), (2, ((1, 6, 8),))), before=(8,)),
    "fetched rows as far as its own": Tree(((3, ((1, 0, 3),)), (3, ((1, 3, 6),))), before=(6,)),
}


def random_tree(seed: int, longest: int = 9) -> Tree:
    """Each document is a root, which may see fetched rows, or branches from an earlier one after some of its rows."""
    draw = random.Random(seed)
    before = tuple(draw.randint(1, longest) for _ in range(draw.randint(0, 2)))
    documents: list[tuple[int, tuple[tuple[int, int, int], ...]]] = []
    start = 0
    starts = []
    for _ in range(draw.randint(1, 9)):
        rows, sees = draw.randint(1, longest), ()
        if documents and draw.random() < 0.8:
            parent = draw.randrange(max(0, len(documents) - 3), len(documents))
            cut = starts[parent] + draw.choice((documents[parent][0], draw.randint(1, documents[parent][0])))
            sees = (*documents[parent][1], (0, starts[parent], cut))
        elif before:
            source = draw.randint(1, len(before))
            low = draw.randrange(before[source - 1])
            sees = ((source, low, draw.randint(low + 1, before[source - 1])),)
        documents.append((rows, sees))
        starts.append(start)
        start += rows
    return Tree(tuple(documents), before)


def tensors_of(tree: Tree, dtype: torch.dtype, device: str = "cpu", width: int = 16) -> dict[str, Tensor]:
    """Query, keys, values and those before, by name, [1, heads, rows, width], laid out as a model's projections."""
    draw = torch.Generator().manual_seed(0)
    length = tree.bounds[-1]
    rows = {"query": (length, HEADS), "keys": (length, KV_HEADS), "values": (length, KV_HEADS)}
    for at, length in enumerate(tree.before, 1):
        rows |= {f"keys before {at}": (length, KV_HEADS), f"values before {at}": (length, KV_HEADS)}
    drawn = {name: torch.randn(1, *shape, width, generator=draw, dtype=torch.float64) for name, shape in rows.items()}
    return {name: each.to(device, dtype).transpose(1, 2) for name, each in drawn.items()}


def dense(tree: Tree, scale: float | None, query: Tensor, keys: Tensor, values: Tensor, *before: Tensor) -> Tensor:
    """By one mask over all keys, in the tensors' dtype."""
    bounds, offsets = tree.bounds, [0, tree.bounds[-1]]
    for length in tree.before:
        offsets.append(offsets[-1] + length)
    mask = torch.zeros(bounds[-1], offsets[-1], dtype=torch.bool)
    for (rows, sees), start in zip(tree.documents, bounds[:-1], strict=True):
        mask[start : start + rows, start : start + rows] = torch.ones(rows, rows).tril().bool()
        for source, low, high in sees:
            mask[start : start + rows, offsets[source] + low : offsets[source] + high] = True
    groups = query.shape[1] // keys.shape[1]
    k, v = (torch.cat(each, 2).repeat_interleave(groups, 1) for each in ((keys, *before[::2]), (values, *before[1::2])))
    scores = query @ k.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~mask.to(query.device), -torch.inf).softmax(-1) @ v


def with_gradients(given: dict[str, Tensor], attention: Any) -> dict[str, Tensor]:
    """`out` of `attention(*given)`, and the gradients by name, for a random gradient of it, in bf16."""
    leaves = {name: each.clone().requires_grad_() for name, each in given.items()}
    out = attention(*leaves.values())
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    out.backward(seed)
    return {"out": out.detach(), **{name: each.grad for name, each in leaves.items()}}
