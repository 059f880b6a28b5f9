"""PEFT's adapter in a model's folder, merged into the weights of its base while they are loaded."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.environment import needs_transformers, quiet_bitsandbytes
from ..base.errors import in_a_line
from ..base.untyped import untyped
from .adapter import merged, merged_layer, origins_of


class Merge:
    """What the adapter in the folder or hub id `source` makes of the weights of `base`, read by transformers.

    `made`: the base on the meta device, which stays as it is. Raises ValueError for an adapter that transformers can't
    load, or not with all its values, and for one that PEFT can't merge.
    """

    def __init__(self, made: nn.Module, source: str | Path, base: str) -> None:
        quiet_bitsandbytes()
        from peft import PeftConfig

        model: Any = copy.deepcopy(made)
        model.hf_device_map = {"": "cpu"}  # of the adapter: else its tensors are read onto the meta device
        kind, way = "an adapter", f"give {base}, or what PEFT's merge_and_unload() makes of both, if it can merge them"
        try:
            if needs := needs_transformers("5.7"):  # an older one does not say which values it did not find
                raise ValueError(f"merging {needs}")
            kind = f"an adapter of type {untyped(PeftConfig.from_pretrained(str(source))).peft_type.value}"
            with quietly():
                missing = model.load_adapter(str(source)).missing_keys
            lost = [name for name in missing if model.get_parameter(name).is_meta]
            known = {*made.state_dict(), *model.state_dict(), *dict(made.named_buffers())}
            computed = dict(model.named_buffers()).keys() - known  # which can't be, on the meta device
            lost += [name for name in computed if "trainable_tokens_original" not in name]  # merging reads the base's
            if lost:
                raise ValueError(f"it does not read {min(lost)} from its files")
        except Exception as error:  # also of libraries' own classes
            why = in_a_line(error)
            raise ValueError(f"{source} has {kind} that can't be loaded ({why}): {way}") from error
        self.origins = dict(origins_of(model))
        self._name = {id(origin.value): name for name, origin in origins_of(model, adapted=False)}
        self._tied: dict[int, list[str]] = {}
        for name, origin in origins_of(made):
            self._tied.setdefault(id(origin.value), []).append(name)
        layers = {repr(each.layer): each.layer for each in self.origins.values() if each.layer is not None}
        for layer in layers.values():  # one of each kind is tried before anything is loaded
            try:
                merged_layer(layer, lambda value: torch.zeros_like(value, device="cpu"))
            except NotImplementedError as error:
                raise ValueError(f"{source} has {kind} that can't be merged ({error}): {way}") from error

    def differ(self, one: str, other: str) -> bool:
        """True if two names, tied in the base, are no longer one tensor."""
        return self.origins[one].key() != self.origins[other].key()

    def changed(self, sources: dict[str, Any]) -> list[str]:
        """The names of tensors that are not the base's, of which it may have none, as of a classifier's score. Adds to
        `sources`, by name, those of tied tensors.
        """
        for names in self._tied.values():
            for found in [name for name in names if name in sources][:1]:
                for name in names:
                    sources.setdefault(name, sources[found])
        own = {name for name, each in self.origins.items() if not (each.layer or each.value.is_meta)}
        merged = {name for name, each in self.origins.items() if (each.layer or each.pairs) and name in sources}
        return [name for name in self.origins if name in own | merged]

    def whole(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The whole merged tensor `name`. `read(name)`: a whole tensor of the base."""

        def value(tensor: torch.Tensor) -> torch.Tensor:
            whole = read(self._name[id(tensor)]) if tensor.is_meta else tensor
            return whole.to(tensor.dtype, copy=True)  # PEFT merges into it, and safetensors reads it once

        origin = self.origins[name]
        if origin.layer is not None:
            return merged_layer(origin.layer, value)[origin.name]
        return merged(value(origin.value), origin.pairs, value)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' progress bar, of every rank."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
