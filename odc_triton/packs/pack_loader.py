"""A data set as a trainer takes it: its samples' sizes, by which they are assigned, and its packs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ..base.untyped import untyped
from ..plan.fields import values_of
from ..plan.relatives import floor_of
from ..plan.sampler import MinibatchSampler
from ..plan.tower import TowerCost
from .collate import PackedDataset, pack_collate
from .enable import innermost
from .images import trains_tower

_COMPARED = 256  # samples of a data set


class PackLoader(DataLoader):
    """This rank's packs of each minibatch, collated: `DataLoader` with a MinibatchSampler, whose epoch can be set."""

    def __init__(
        self, dataset: Any, sampler: MinibatchSampler, collate_fn: Callable = pack_collate, **loader: Any
    ) -> None:
        super().__init__(PackedDataset(dataset), batch_sampler=sampler, collate_fn=collate_fn, **loader)

    def set_epoch(self, epoch: int) -> None:
        untyped(self.batch_sampler).set_epoch(epoch)


def measured(
    dataset: Any, indices: Sequence[int] | None = None, *, untaken: Set[str] = frozenset()
) -> tuple[list[int], list[int], list[list[int]]]:
    """Each sample's tokens, those up to its last image's, and `values_of` its images; reads each sample once.

    Raises TypeError or ValueError for a data set without lengths or token ids, or with fields of the names `untaken`.
    """
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length: give a map-style data set; samples are assigned by their lengths"
        )
    if not len(dataset):
        raise ValueError("the data set has no samples")
    lengths, floors, values = [], [], []
    for index in range(len(dataset)) if indices is None else indices:
        sample = dataset[index]
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            keys = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
            raise ValueError(f"sample {index} has {keys}: it needs input_ids, tokenised")
        if more := sorted(name for name in untaken if sample.get(name) is not None):
            raise ValueError(
                f"sample {index} has {', '.join(more)}, which the trainer would leave out, as packs have no place for "
                f"other inputs of the model than ids, labels and images: remove the column, or give it as labels"
            )
        lengths.append(len(sample["input_ids"]))
        floors.append(floor_of(sample))
        values.append(values_of(sample))
    return lengths, floors, values


def digest_of(dataset: Any) -> str | None:
    """A digest of at most `_COMPARED` samples, evenly spaced: of their tokens, or of all fields if they have none.
    None for no data set, its name, a stream, and samples that have no digest.
    """
    from transformers.trainer_utils import has_length  # which imports PEFT, if it is there, and bitsandbytes

    if isinstance(dataset, (str, IterableDataset)) or not (has_length(dataset) and hasattr(dataset, "__getitem__")):
        return None
    count, found = len(dataset), hashlib.sha256()
    for place in sorted({count * part // _COMPARED for part in range(_COMPARED)} if count else ()):
        sample = untyped(dataset)[place]
        if isinstance(sample, Mapping) and "input_ids" in sample:
            sample = {name: sample.get(name) for name in ("input_ids", "labels", "position_ids")}
        try:
            found.update(json.dumps([count, sample], default=_plain).encode())
        except (TypeError, ValueError, RuntimeError, RecursionError):
            return None
    return found.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    to_plain = next((getattr(value, name) for name in ("tolist", "tobytes", "hex") if hasattr(value, name)), None)
    return type(value).__name__ if to_plain is None else str(to_plain())


def tower_costs(model: nn.Module, images: list[list[int]] | None) -> list[float] | None:
    """What each sample costs in addition to its tokens; None without images. `images`: by sample `values_of`."""
    if images is None or not any(images):
        return None
    tower = TowerCost.from_config(innermost(model).config, trained=trains_tower(model))
    return [tower.sample(values) for values in images]


def refuse_drawn(dataset: Any, lengths: Sequence[int]) -> None:
    """Raises ValueError if the longest sample has other tokens or labels when it is read again."""
    index = max(range(len(lengths)), key=lengths.__getitem__)
    if is_drawn(dataset, index):
        raise ValueError(
            f"sample {index} has other tokens or labels each time it is read, and ranks that share a sample have to "
            f"read the same: draw them beforehand, or leave out split=True and the sampler's `split` and `relatives`"
        )


def is_drawn(dataset: Any, index: int = 0) -> bool:
    """True if the sample has other tokens or labels when it is read again."""
    first, again = dataset[index], dataset[index]
    return any(_listed(first, name) != _listed(again, name) for name in ("input_ids", "labels", "position_ids"))


def _listed(sample: Mapping[str, Any], name: str) -> list[int]:
    return [] if sample.get(name) is None else [*sample[name]]
