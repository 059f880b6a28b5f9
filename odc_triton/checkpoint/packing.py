"""Packs weights in bitsandbytes' format while they are loaded: each rank its own rows, no rank the whole.

4-bit codes and scales are of blocks of the flattened weight; blocks cross the borders of rows and shards. Double
quantisation needs all blocks' scales. So a 4-bit weight is loaded in steps, between which all ranks meet:

measure     the scales of the blocks that begin in this rank's shard, fp32: written into the packed shard
centre      their mean over all blocks, by the rank that has the offset: it depends on how many threads add
describe    all ranks' scales are read; this rank's part of absmax, nested absmax and codes is written
pack        this rank's codes, where the scales were

A block's codes take 16 bytes or more and its scale 4, so scales fit where the codes will be, except in a shard of less
than 4 bytes: of such a one each rank computes the scale itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bitsandbytes import functional
from torch import nn

from ..base.untyped import untyped
from ..engine.parameter import ShardedParameter
from ..nn.packed import Blocks, packed_state, packed_weight
from .parameters import PackedWeight, Take

_CHUNK = 2**20  # elements packed at a time
_SCALE_BYTES = 4


def packed_weights(
    model: nn.Module, parameters: dict[int, ShardedParameter]
) -> Iterator[tuple[str, set[str], PackedWeight]]:
    """(name in files, names of its parameters here, weight) of each layer that `nn.packed` has prepared."""
    for name, layer in model.named_modules(remove_duplicate=False):
        if (state := packed_state(layer)) is None:
            continue
        experts, _, key = name.rpartition(".parametrizations.")
        plain = f"{experts}.{key}" if experts else f"{name}.weight"
        own = {
            f"{name}.{each}" for each, value in layer.named_parameters() if value is packed_weight(layer) or "." in each
        }
        kind = Packed4bit if isinstance(state, Blocks) else Packed8bit
        yield plain, own, kind(layer, state, lambda value: parameters[id(value)])


class Packed8bit(PackedWeight):
    def __init__(self, layer: Any, state: Any, parameter: Callable[[Any], ShardedParameter]) -> None:
        super().__init__(layer, packed_weight(layer).shape)
        self._weight, self._scales = parameter(packed_weight(layer)).shard, parameter(state.scales).shard
        self._dtype = state.dtype
        self.steps = (self._pack,)

    def _pack(self, take: Take) -> None:
        first, end = self._weight.master_rows
        step, read = max(1, _CHUNK // self._weight.spec.shape[1]), self.rows(take)
        for start in range(first, end, step):
            stop = min(start + step, end)
            rows = read(start, stop).to(self._weight.master.device, self._dtype).half()
            at = slice(start - first, stop - first)
            self._weight.master[at], self._scales.master[at], _ = functional.int8_vectorwise_quant(rows.contiguous())


class Packed4bit(PackedWeight):
    def __init__(self, layer: Any, state: Any, parameter: Callable[[Any], ShardedParameter]) -> None:
        super().__init__(layer, state.shape)
        self._state, self._parameter, self._weight = state, parameter, parameter(packed_weight(layer)).shard
        self._elements, self._width = math.prod(self.shape), math.prod(state.shape[1:])
        self.steps = (self._measure, self._centre, self._describe, self._pack)

    def _blocks_of(self, part: tuple[int, int]) -> tuple[int, int]:
        """The blocks that begin in these rows of the packed weight."""
        values = 2 * self._weight.master.itemsize
        first, end = (-(-min(row * values, self._elements) // self._state.blocksize) for row in part)
        return first, end

    def _quantised(self, take: Take, first: int, end: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(first block, codes as bytes, scales) of these blocks, some at a time."""
        size, width, rows = self._state.blocksize, self._width, self.rows(take)
        for block in range(first, end, step := max(1, _CHUNK // size)):
            start, stop = block * size, min(min(block + step, end) * size, self._elements)
            row = start // width
            values = rows(row, -(-stop // width)).reshape(-1)[start - row * width : stop - row * width]
            values = values.to(self._weight.master.device, self._state.dtype)
            codes, state = untyped(functional).quantize_4bit(values, blocksize=size, quant_type=self._state.quant_type)
            yield block, codes.view(-1), state.absmax

    def _scales_of(self, take: Take, part: tuple[int, int]) -> torch.Tensor:
        scales = [scales for *_, scales in self._quantised(take, *self._blocks_of(part))]
        return torch.cat(scales or [torch.empty(0, device=self._weight.master.device)])

    def _measure(self, take: Take) -> None:
        into = self._weight.master.view(-1).view(torch.uint8)
        if len(into) >= _SCALE_BYTES:
            scales = self._scales_of(take, self._weight.master_rows).view(torch.uint8)
            into[: len(scales)] = scales

    def _all_scales(self, take: Take) -> torch.Tensor:
        found = []
        for row, codes in self._weight.parts_of_all():
            part, held = (row, row + len(codes)), codes.view(-1).view(torch.uint8)
            if len(held) < _SCALE_BYTES:
                found.append(self._scales_of(take, part))
            else:
                first, end = self._blocks_of(part)
                found.append(held[: _SCALE_BYTES * (end - first)].clone().view(torch.float32))
        return torch.cat(found)

    def _centre(self, take: Take) -> None:
        if self._state.nested and self._parameter(self._state.offset).shard.master.numel():
            self._fill(self._state.offset, self._all_scales(take).mean())

    def _describe(self, take: Take) -> None:
        state, absmax = self._state, self._all_scales(take)
        self._fill(state.code, functional.get_4bit_type(state.quant_type, device=absmax.device))
        if state.nested:  # as in bitsandbytes' quantize_4bit
            absmax = absmax - self._parameter(state.offset).read()
            absmax, nested = untyped(functional).quantize_blockwise(absmax, blocksize=state.state2.blocksize)
            self._fill(state.state2.absmax, nested.absmax)
            self._fill(state.state2.code, nested.code)
        self._fill(state.absmax, absmax)

    def _fill(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._parameter(parameter).shard.adopt(value)

    def _pack(self, take: Take) -> None:
        first, end = (row * self._weight.master.itemsize for row in self._weight.master_rows)
        bytes_each, into = self._state.blocksize // 2, self._weight.master.view(-1).view(torch.uint8)
        for block, codes, _ in self._quantised(take, first // bytes_each, -(-end // bytes_each)):
            start = block * bytes_each
            low, high = max(start, first), min(start + len(codes), end)
            into[low - first : high - first] = codes[low - start : high - start]
