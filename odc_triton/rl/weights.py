"""A sharded policy's weights as a checkpoint of plain transformers has them, for an engine that samples elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..checkpoint.adapter import adapted_weights, merged
from ..checkpoint.pretrained import empty_copy, tensors_by_unit, transformers_part
from ..checkpoint.sharded import sharded_parameters
from ..engine.api import engine_of
from ..engine.parameter import ShardedParameter

PIECE_BYTES = 2**30
Place = ShardedParameter | torch.Tensor


class PolicyWeights:
    """(name, whole tensor in the compute dtype) of everything that a checkpoint's files have, again on every walk.

    Names and shapes are those of the files: a tied weight once, experts apart, PEFT's LoRA added to its base. Any one
    rank may walk, as `full_parameters` does, and raises what that raises; it holds the tensors of one unit at a time.

    Raises TypeError for a model that is not transformers', NotImplementedError for adapters that can't be added.
    """

    def __init__(self, model: nn.Module) -> None:
        prefix, part = transformers_part(model)
        self._engine = engine_of(model)
        self._empty = empty_copy(part)
        self._parameters = sharded_parameters(model)
        self._adapted = adapted_weights(part) if prefix else {}
        self._units: list[dict[str, Place]] = [
            {name: self._parameters.get(id(value), value) for name, value in unit.items()}
            for unit in tensors_by_unit(part, self._empty)
        ]
        self._metadata: list[tuple[str, torch.dtype, tuple[int, ...]]] | None = None

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) of what a walk gives, in its order; reads nothing."""
        if self._metadata is None:
            walk = self._walk(lambda _, place: _like(place))
            self._metadata = [(name, value.dtype, tuple(value.shape)) for name, value in walk]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._walk(self._read)

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """A walk in lists of at most `piece_bytes`, or of one tensor that is larger."""
        piece: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, value in self:
            if piece and size + value.nbytes > piece_bytes:
                yield piece
                piece, size = [], 0
            piece.append((name, value))
            size += value.nbytes
        if piece:
            yield piece

    def _walk(self, read: Callable[[str, Place], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        for unit in self._units:
            values = {name: read(name, place) for name, place in unit.items()}
            for name, value in revert_weight_conversion(self._empty, values).items():
                yield name, value.contiguous()

    @torch.no_grad()
    def _read(self, name: str, place: Place) -> torch.Tensor:
        value = self._whole(place)
        return merged(value, self._adapted.get(name, ()), lambda weight: self._whole(self._parameters[id(weight)]))

    def _whole(self, place: Place) -> torch.Tensor:
        if isinstance(place, torch.Tensor):
            return place.detach()
        ((_, whole),) = self._engine.full_parameters([place])
        return whole


def _like(place: Place) -> torch.Tensor:
    """A tensor without memory, of the dtype and shape that is read."""
    if isinstance(place, torch.Tensor):
        return torch.empty_like(place, device="meta")
    return torch.empty(place.spec.whole_shape, dtype=place.leaf.dtype, device="meta")
