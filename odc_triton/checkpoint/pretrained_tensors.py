"""A sharded model's whole tensors in the form of plain transformers' files, to write or send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from ..engine.api import engine_of
from ..engine.parameter import ShardedParameter
from .adapter import adapted_weights, merged
from .parameters import sharded_parameters
from .pretrained import Place, empty_copy, tensors_by_unit, transformers_part

T = TypeVar("T")


class PretrainedTensors:
    """Iterates over (name, whole tensor) of everything in a checkpoint's files; may be iterated again.

    Names and shapes are those of the files: a tied weight once, experts separate, PEFT's LoRA added to its base.
    Parameters are in `dtype`, by default the compute dtype, and on `device`, by default their own. Any one rank
    may iterate; it raises as `full_parameters`, and holds the tensors of one unit at a time.
    `empty`: a model on the meta device with the same config and names. `units`: what is read, by the names in `empty`.
    `adapted`: the pairs that LoRA adds to it.

    Raises TypeError for a model that is not transformers', NotImplementedError for adapters that can't be added,
    RuntimeError for parameters that have no values here.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None, device: Any = None) -> None:
        prefix, part = transformers_part(model)
        if missing := [name for name, value in part.named_parameters() if value.is_meta]:
            raise RuntimeError(f"no values for {missing[:3]}: they were not sharded (ignored_params)")
        self.empty = empty_copy(part)
        self._engine, self._dtype, self._device = engine_of(model), dtype, device
        self._parameters = sharded_parameters(model)
        self.adapted = adapted_weights(part) if prefix else {}
        self.units: list[dict[str, Place]] = [
            {name: self._parameters.get(id(value), value) for name, value in unit.items()}
            for unit in tensors_by_unit(part, self.empty)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return in_files(self.empty, self.units, self._read)

    def chunks(self, chunk_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The items in lists of at most `chunk_bytes`, or of one tensor that is larger."""
        chunk: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, value in self:
            if chunk and size + value.nbytes > chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append((name, value))
            size += value.nbytes
        if chunk:
            yield chunk

    @torch.no_grad()
    def _read(self, name: str, place: Place) -> torch.Tensor:
        if isinstance(place, torch.Tensor):
            return place.detach().to(self._device)
        whole = merged(self._whole(place), self.adapted.get(name, ()), self._whole_of)
        return whole.to(self._dtype or whole.dtype)

    def _whole_of(self, weight: nn.Parameter) -> torch.Tensor:
        return self._whole(self._parameters[id(weight)])

    def _whole(self, parameter: ShardedParameter) -> torch.Tensor:
        ((_, whole),) = self._engine.full_parameters([parameter.shard])
        return whole.to(self._device)


def in_files(
    empty: nn.Module, units: Iterable[dict[str, T]], read: Callable[[str, T], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) as in a checkpoint's files, of what `read(name, place)` returns for each place in `units`."""
    from transformers.core_model_loading import revert_weight_conversion

    for unit in units:
        values = {name: read(name, place) for name, place in unit.items()}
        for name, value in revert_weight_conversion(empty, values).items():
            yield name, value.contiguous()
