"""A sharded model's whole tensors in the form of plain transformers' files, to write or send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..comm.layout import find_units
from .adapter import Origin, adapter_reads, merged, merged_layer, origins_of
from .parameters import read_whole, sharded_parameters
from .pretrained import empty_copy, transformers_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


def require_written(model: nn.Module, *, merge: bool = False) -> None:
    """Raises NotImplementedError, with its name, if something trained would not be in what is written of `model`, or
    something that is loaded again: of a PEFT model the adapter, with `merge` the whole model. Reads no values."""
    _, part = transformers_part(model)
    if hasattr(model, "peft_config") and not merge:
        read = adapter_reads(model)
    else:
        origins = dict(origins_of(part))
        empty = empty_copy(part)
        if absent := [name for name, _ in origins_of(empty) if name not in origins]:
            raise NotImplementedError(
                f"a plain {type(empty).__name__} has {', '.join(absent[:3])}{', …' if len(absent) > 3 else ''}, and "
                f"what is saved would not: take out what replaced or wrapped these layers, or save the state_dict()"
            )
        read = set().union(*(origin.reads() for origin in origins.values()))
    lost = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in read]
    if lost:
        raise NotImplementedError(
            f"{', '.join(lost[:3])}{', …' if len(lost) > 3 else ''} would be trained, and what is saved or sampled "
            f"from would not have it: freeze it before fully_shard, or name its module in PEFT's modules_to_save"
        )


class PretrainedTensors:
    """Iterates over (name, whole tensor) of everything in a checkpoint's files; may be iterated again.

    Names and shapes are those of the files: a tied weight once, experts separate, PEFT's adapters merged into their
    base. Parameters are in `dtype`, by default the compute dtype, and on `device`, by default their own. Any one rank
    may iterate; it raises as `full_parameters`, and holds the tensors of one unit at a time.
    `empty`: a model on the meta device with the same config and names; the config ties no weights if memory does not.
    `units`: what is read, by the names in `empty`.

    Raises TypeError for a model that is not transformers', NotImplementedError for adapters that can't be merged and
    for trained parameters that would be left out, RuntimeError for parameters that have no values here.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None, device: Any = None) -> None:
        _, part = transformers_part(model)
        if missing := [name for name, value in part.named_parameters() if value.is_meta]:
            raise RuntimeError(f"no values for {missing[:3]}: they were not sharded (ignored_params)")
        self.empty = empty_copy(part)
        self._model, self._dtype, self._device = model, dtype, device
        self._parameters, self._part = sharded_parameters(model), part
        require_written(model, merge=True)
        origins = dict(origins_of(part))
        layers = {repr(each.layer): each.layer for each in origins.values() if each.layer is not None}
        for layer in layers.values():  # one of each kind that PEFT merges is tried before anything is written
            self._merged(layer)
        self.units = _by_unit(origins, self.empty)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        layer = lru_cache(maxsize=1)(self._merged)  # the tensors of a layer come one after the other
        return in_files(self.empty, self.units, partial(self._read, layer))

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
    def _read(self, layer: Callable[[nn.Module], dict[str, torch.Tensor]], _: str, origin: Origin) -> torch.Tensor:
        whole = origin.below(self._whole) if origin.layer is None else layer(origin.layer)[origin.name]
        whole = merged(whole, origin.pairs, self._whole)
        return whole if id(origin.value) not in self._parameters else whole.to(self._dtype or whole.dtype)

    def _merged(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        try:
            return merged_layer(layer, self._whole)
        except NotImplementedError as error:
            name = next(name for name, each in self._part.named_modules() if each is layer)
            raise NotImplementedError(
                f"{name}: {error}: use another adapter, sample by transformers, or save the adapter alone"
            ) from error

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        return read_whole(self._model, self._parameters.get(id(value), value), None, self._device)


def _by_unit(origins: dict[str, Origin], empty: PreTrainedModel) -> list[dict[str, Origin]]:
    """`origins` by their names in files, a tied one once, grouped by unit, as transformers converts only tensors of the
    same unit. What is tied is what is one tensor in memory: if the config ties others, it is changed in `empty`."""
    known = getattr(empty, "all_tied_weights_keys", {})
    tied = {name: other for name, other in known.items() if {name, other} <= origins.keys()}
    if any(origins[name].key() != origins[other].key() for name, other in tied.items()):
        tied = {}
        for config in (empty.config, *(getattr(empty.config, name, None) for name in empty.config.sub_configs)):
            if config is not None and getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
    units = find_units(empty)
    groups: dict[str, dict[str, Origin]] = {unit: {} for unit in ["", *units]}
    for name, origin in origins.items():
        if name not in tied:
            groups[next((unit for unit in units if name.startswith(f"{unit}.")), "")][name] = origin
    return list(groups.values())


def in_files(
    empty: PreTrainedModel, units: Iterable[dict[str, T]], read: Callable[[str, T], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) as in a checkpoint's files, of what `read(name, place)` returns for each place in `units`."""
    from transformers.core_model_loading import revert_weight_conversion

    for unit in units:
        values = {name: read(name, place) for name, place in unit.items()}
        for name, value in revert_weight_conversion(empty, values).items():
            yield name, value.contiguous()
