"""Records with images, as TRL has them, as samples: each is read and collated alone, when it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...plan.fields import IMAGE_FIELDS, TOKEN_TYPES

_IMAGES = ("image", "images")  # columns, as TRL names them
_REMEDY = "correct it, or give a data_collator that makes of it what the model's processor makes, and labels"


def has_image_records(dataset: Any) -> bool:
    """True for a data set whose records have images and no tokens."""
    has_length = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    first = next(iter(dataset), None) if has_length else None
    return isinstance(first, Mapping) and "input_ids" not in first and any(name in first for name in _IMAGES)


class ImageRecords(torch.utils.data.Dataset):
    """Samples for `pack_collate`, one of each record.

    records: a map-style data set.
    collate: makes of a list of one record what the model takes and `labels`, as TRL's
        DataCollatorForVisionLanguageModeling does.
    processor: that of transformers that `collate` uses. It says which tokens are images' if `collate` does not.
    """

    def __init__(self, records: Any, collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]], processor: Any):
        self.records, self.collate, self.processor = records, collate, processor
        self.measured: tuple[list[int], list[int], list[list[int]]] | None = None  # once it is known

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises ValueError for a record that can't be collated, naming it."""
        record = dict(self.records[index])  # a collator may change it
        if record.get("image") is None:
            record.pop("image", None)
            record["images"] = record.get("images") or []
        try:
            batch = self.collate([record])
        except Exception as error:  # an image, a template or a processor may raise anything
            raise ValueError(
                f"record {index} can't be collated ({type(error).__name__}: {error}): {_REMEDY}"
            ) from error
        if missing := [name for name in ("input_ids", "labels") if name not in batch]:
            raise ValueError(f"record {index}: the data_collator returned no {missing[0]}: {_REMEDY}")
        ids = batch["input_ids"]
        kept = torch.as_tensor(batch.get("attention_mask", torch.ones_like(ids)))[0].bool()
        sample = {name: batch[name][0][kept] for name in ("input_ids", "labels", *TOKEN_TYPES) if name in batch}
        sample |= {name: batch[name] for name in IMAGE_FIELDS if name in batch}
        if not sample.keys() & {*TOKEN_TYPES} and self.processor is not None:
            shown = getattr(self.processor, "image_token_ids", None) or [self.processor.image_token_id]
            sample["mm_token_type_ids"] = torch.isin(sample["input_ids"], torch.tensor(shown)).long()
        return sample
