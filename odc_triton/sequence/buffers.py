"""Buffers of the keys and values that other ranks read, and of the gradients that they add.

A second heap of the model's ranks. Per layer, for the `tokens` of each rank:

keys, values        [tokens, heads, D] in the compute dtype: rows that their rank writes and later pieces read
their gradients     the same in `sum_dtype`: rows that later pieces add to and their rank takes

Where the heap is one memory (CPU), buffers of all ranks are joined and a sequence's rows are adjacent, so that all keys
before a piece are one view and reading costs nothing. Where it is apart, each rank has its own buffers.

Flags are words with one writer and no reset, in the buffers of the rank that waits for them. Their values are epochs,
which only grow:

PUBLISHED, [writer, layer]     the wave up to which `writer` has written the layer's rows
ADDED, [writer, layer]         the wave up to which `writer` has added to this rank's rows
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from ..balance.pieces import PlannedPiece
from ..comm.layout import place_regions
from ..comm.memory.heap import Status, SymmetricHeap

KEYS, VALUES = 0, 1


class Flag(IntEnum):
    """The signals of a layer from one rank to another."""

    PUBLISHED = 0
    ADDED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """A layer's heads of keys and values, their widths, and the dtype in which they are computed."""

    heads: int
    key_width: int
    value_width: int
    dtype: str

    @property
    def sum_dtype(self) -> str:
        """Gradients are summed in fp32, or in the compute dtype where that is wider."""
        return "float64" if self.dtype == "float64" else "float32"


def buffer_regions(layers: list[LayerShape], *, tokens: int, world: int, apart: bool) -> tuple[list[Any], int]:
    """The regions, one for each flag, then four of each layer, and the bytes of the heap (`apart`: of one rank)."""

    def rows(heads: int, width: int, dtype: str) -> tuple[tuple[int, ...], str, int]:
        shape = (world, tokens, heads, width) if apart else (world * tokens, heads, width)
        return shape, dtype, getattr(torch, dtype).itemsize

    flags = [((world, world * len(layers)), "int64", 8)] * len(Flag)
    data = [
        rows(layer.heads, width, dtype)
        for layer in layers
        for dtype in (layer.dtype, layer.sum_dtype)
        for width in (layer.key_width, layer.value_width)
    ]
    return place_regions([*flags, *data], world=world, apart=apart)


class KVBuffers:
    """Collective: all ranks of `beside`, the model's heap, open it with the same arguments. `token`: as a heap's."""

    def __init__(
        self, beside: SymmetricHeap, layers: list[LayerShape], *, tokens: int, token: str, timeout_s: float
    ) -> None:
        self.rank, self.world, self.tokens, self.layers = beside.rank, beside.world, tokens, len(layers)
        regions, size_bytes = buffer_regions(layers, tokens=tokens, world=beside.world, apart=beside.apart)
        self.heap = heap = beside.another(size_bytes=size_bytes, slots=len(layers), token=token, timeout_s=timeout_s)
        self.failed = Status(heap)  # the number of the plan that the rank can't complete
        ranks = range(self.world)
        flags, data = regions[: len(Flag)], regions[len(Flag) :]
        self._flags = [[heap.shard(each, rank)[0].view(self.world, self.layers) for rank in ranks] for each in flags]
        # [layer][rows of keys, of values, of the keys' gradients, of the values']: by rank, or one for all
        buffers = [[heap.shard(each, rank)[0] for rank in ranks] if heap.apart else [heap.whole(each)] for each in data]
        self._buffers = [buffers[at : at + 4] for at in range(0, len(buffers), 4)]

    def rows(self, layer: int, kind: int, piece: PlannedPiece, start: int, stop: int) -> torch.Tensor:
        """Tokens `start` to `stop` of the sample, which begin in `piece`, and end there too unless buffers are joined:
        a view [stop - start, heads, D].
        """
        return self._view(self._buffers[layer][kind], piece, start, stop)

    def gradient_rows(self, layer: int, kind: int, piece: PlannedPiece, start: int, stop: int) -> torch.Tensor:
        return self._view(self._buffers[layer][2 + kind], piece, start, stop)

    def _view(self, buffers: list[torch.Tensor], piece: PlannedPiece, start: int, stop: int) -> torch.Tensor:
        joined = not self.heap.apart
        first = (piece.joint_offset if joined else piece.offset) + start - piece.piece.start
        return buffers[0 if joined else piece.rank][first : first + stop - start]

    def flags(self, flag: Flag, rank: int) -> torch.Tensor:
        """The flags that others have set for `rank`: int64 [writer, layer]."""
        return self._flags[flag][rank]

    def has_come(self, flag: Flag, rank: int, layer: int, epoch: int, *, writer: int) -> bool:
        """True once `writer` has set that flag for `rank`."""
        return int(self.flags(flag, rank)[writer, layer]) >= epoch

    def clear_own_gradients(self) -> None:
        """Zeroes this rank's gradient buffers: what a minibatch that failed has left there."""
        for layer in self._buffers:
            for buffers in layer[2:]:
                own = buffers[self.rank] if self.heap.apart else buffers[0][self.rank * self.tokens :][: self.tokens]
                own.zero_()
