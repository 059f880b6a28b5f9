"""Buffers of the keys and values that other ranks read, and of the gradients that they add.

A second heap of the model's ranks. For the `tokens` of each rank, in buffers that layers of one shape take in turn:

keys, values        [tokens, heads, D] in the compute dtype: rows that their rank writes and later segments read
their gradients     the same in `sum_dtype`: rows that later segments add to and their rank takes

A recurrent layer counts as two, of which the first has a convolution's input, [rows, 1, channels], and the second
states, (A, B) [cuts, heads, elements]: `rows_per_cut` of them for each of a rank's `cuts` (plan/cuts.py).

With activation checkpointing a few buffers serve all layers: a layer's rows are written in the forward and again in its
recomputation (`exchange.py` says when). The last layer of a buffer *stays*: its backward finds what its forward wrote.

Flags are words with one writer and no reset, in the buffers of the rank that waits for them. Their values are epochs,
which only grow; a wave has one for its forward and one for its backward:

PUBLISHED, [writer, layer]     `writer` has written the layer's rows
READ, [writer, layer]          `writer` has read this rank's rows, in a forward
ADDED, [writer, layer]         `writer` has added to this rank's rows
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import torch

from ..comm.layout import place_regions
from ..comm.memory.heap import Status, SymmetricHeap
from ..plan.segments import PlannedSegment

RUN_TOKENS = 65_536  # of other ranks, that attention reads at once
CUTS = 8  # of a rank, after which others go on, in a minibatch
IN_FLIGHT = 2  # buffers per shape of layer, where all layers are checkpointed: one is read while the next is written


class Flag(IntEnum):
    """The signals of a layer from one rank to another, in their order within a pass."""

    PUBLISHED = 0
    READ = 1
    ADDED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """A layer's heads, the widths of what it publishes of each (of keys, of values), and the dtype of its rows.

    `rows_per_cut`: 0 for attention, whose rows are of tokens. `states`: see `CutPlan`.
    """

    heads: int
    widths: tuple[int, ...]
    dtype: str
    rows_per_cut: int = 0
    states: bool = False

    def rows(self, tokens: int, cuts: int) -> int:
        """Of a buffer on one rank."""
        return self.rows_per_cut * cuts if self.rows_per_cut else tokens

    @property
    def sum_dtype(self) -> str:
        """Gradients are summed in fp32, or in the compute dtype where that is wider."""
        return "float64" if self.dtype == "float64" else "float32"


def slots_of(layers: Sequence[LayerShape], in_flight: int) -> list[int]:
    """By layer, the number of its buffers: layers of one shape take turns in `in_flight` of them."""
    slots: dict[tuple[LayerShape, int], int] = {}
    met: Counter[LayerShape] = Counter()
    found = []
    for layer in layers:
        found.append(slots.setdefault((layer, met[layer] % in_flight), len(slots)))
        met[layer] += 1
    return found


def buffer_regions(
    layers: Sequence[LayerShape],
    *,
    tokens: int,
    world: int,
    in_flight: int,
    gradients: bool,
    apart: bool,
    cuts: int = 0,
) -> tuple[list[Any], int]:
    """The regions, one for each flag, then of each buffer those of its rows, with `gradients` also of their gradients,
    and the bytes of the heap (`apart`: of one rank).
    """
    shapes = dict(zip(slots_of(layers, in_flight), layers, strict=True)).values()  # by slot, in their order
    flags = [((world, world * len(layers)), "int64", 8)] * len(Flag)
    data = [
        ((world, layer.rows(tokens, cuts), layer.heads, width), dtype, getattr(torch, dtype).itemsize)
        for layer in shapes
        for dtype in (layer.dtype, layer.sum_dtype)[: 1 + gradients]
        for width in layer.widths
    ]
    return place_regions([*flags, *data], world=world, apart=apart)


class KVBuffers:
    """Collective: all ranks of `beside`, the model's heap, open it with the same arguments. `token`: as a heap's.

    `in_flight`: see `slots_of`, by default one for each layer; `gradients`: false for a model that is never trained.
    """

    def __init__(
        self,
        beside: SymmetricHeap,
        layers: Sequence[LayerShape],
        *,
        tokens: int,
        token: str,
        timeout_s: float,
        cuts: int = 0,
        in_flight: int | None = None,
        gradients: bool = True,
    ) -> None:
        self.rank, self.world, self.tokens, self.layers = beside.rank, beside.world, tokens, len(layers)
        self.shapes, self.cuts, in_flight = tuple(layers), cuts, in_flight or len(layers)
        shape = {"tokens": tokens, "cuts": cuts, "world": beside.world, "in_flight": in_flight, "gradients": gradients}
        regions, size_bytes = buffer_regions(layers, **shape, apart=beside.apart)
        self.heap = heap = beside.another(size_bytes=size_bytes, locks=len(layers), token=token, timeout_s=timeout_s)
        self.failed = Status(heap)  # the number of the plan that the rank can't complete
        self.slots = slots_of(layers, in_flight)
        last = {slot: layer for layer, slot in enumerate(self.slots)}
        self.stays = [last[slot] == layer for layer, slot in enumerate(self.slots)]
        ranks = range(self.world)
        flags, data = regions[: len(Flag)], regions[len(Flag) :]
        self._flags = [[heap.shard(each, rank)[0].view(self.world, self.layers) for rank in ranks] for each in flags]
        # [slot][rows of keys, of values, of the keys' gradients, of the values'][rank]
        buffers = iter([[heap.shard(each, rank)[0] for rank in ranks] for each in data])
        by_slot = dict(zip(self.slots, layers, strict=True)).values()
        self._buffers = [[*islice(buffers, len(layer.widths) * (1 + gradients))] for layer in by_slot]

    def rows(self, layer: int, kind: int, segment: PlannedSegment, start: int, stop: int) -> torch.Tensor:
        """Tokens `start` to `stop` of the sample, which are in `segment`, a view [stop - start, heads, D]; in a
        recurrent layer rows of cuts: see `CutPlan`.
        """
        first = segment.offset + start - segment.segment.start
        return self._buffers[self.slots[layer]][kind][segment.rank][first : first + stop - start]

    def gradient_rows(self, layer: int, kind: int, segment: PlannedSegment, start: int, stop: int) -> torch.Tensor:
        return self.rows(layer, len(self.shapes[layer].widths) + kind, segment, start, stop)

    def flags(self, flag: Flag, rank: int) -> torch.Tensor:
        """The flags that others have set for `rank`: int64 [writer, layer]."""
        return self._flags[flag][rank]

    def clear_own_gradients(self) -> None:
        """Zeroes this rank's gradient buffers: what a minibatch that failed has left there."""
        for slot, buffers in enumerate(self._buffers):
            for each in buffers[len(self.shapes[self.slots.index(slot)].widths) :]:
                each[self.rank].zero_()
