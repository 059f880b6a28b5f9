"""Which tensors in a Hugging Face folder a model's are made of, by transformers' own names and converters."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .parameters import Take
from .pretrained_files import PretrainedFiles, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK = 2**22  # elements read or compared at a time


@dataclass(slots=True)
class WeightSource:
    """The source of one or more of the model's tensors: names in the files, and transformers' converter, if any."""

    names: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    converter: Any = None


def sources_of(
    empty: PreTrainedModel, files: PretrainedFiles, wanted: Collection[str]
) -> tuple[dict[str, WeightSource], list[str]]:
    """(the source of each `wanted` tensor, as transformers would load it into `empty`; unused names in the files)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(empty)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = empty.state_dict()
    sources: dict[str, WeightSource] = {}
    unexpected = []
    for name in sorted(files.file_of, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, empty.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in wanted:
            unexpected.append(name)
            continue
        if known[target].is_floating_point():
            files.require_plain(name)
        source = sources.setdefault(target, WeightSource())
        source.names.append(name)
        if pattern is not None:
            source.patterns.append(pattern)
            source.converter = source.converter or copy.deepcopy(of_pattern[pattern])
    ignored = [re.compile(pattern) for pattern in empty._keys_to_ignore_on_load_unexpected or ()]
    return sources, [name for name in unexpected if not any(pattern.search(name) for pattern in ignored)]


def values_from(
    source: WeightSource, target: str, model: PreTrainedModel, read: Callable[[str, slice | None], torch.Tensor]
) -> Iterator[tuple[str, Take]]:
    """(name, its value) of what `source` gives, as `target`. `read(name, rows)`: of a tensor in the files."""
    if source.converter is None:
        yield target, partial(read, source.names[0])  # of a tensor that has two names there, as transformers
        return
    converter = copy.deepcopy(source.converter)  # it keeps what it is given
    for name, pattern in zip(source.names, source.patterns, strict=True):
        converter.add_tensor(target, name, pattern, read(name, None))
    for name, value in converter.convert(target, model=model, config=model.config).items():
        yield name, partial(rows_of, value[0] if isinstance(value, list) else value)


def are_equal(files: PretrainedFiles, one: WeightSource, other: WeightSource, rows: slice | None = None) -> bool:
    """True if the tensors, or these rows of them, are equal in fp32. Holds a part of them at a time."""
    names = [each.names[0] for each in (one, other)]
    shape = files.shape(names[0])
    if (
        shape != files.shape(names[1]) or one.converter or other.converter
    ):  # of what is made of several nothing is known
        return False
    first, end, _ = (rows or slice(None)).indices((*shape, 1)[0])
    parts = blocks(first, end, shape)
    return all(torch.equal(*(files.read(name, part).float() for name in names)) for part in parts)


def blocks(first: int, end: int, shape: Sequence[int]) -> Iterator[slice]:
    """Rows `first` to `end` of a tensor of that shape, some at a time."""
    step = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    return (slice(start, min(start + step, end)) for start in range(first, end, step))
