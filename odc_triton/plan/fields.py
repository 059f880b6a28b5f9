"""The fields of a sample, by transformers' names. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

IGNORED = -100  # the label that torch's and transformers' losses ignore
# Of samples, by transformers' names: what a processor makes of images, and which tokens are theirs.
IMAGE_FIELDS = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")


def values_of(sample: Mapping[str, Any]) -> list[int]:
    """Of a sample as `pack_collate` takes it the pixel values of each unit of attention in the tower; [] without any.

    With `image_grid_thw` a unit is an image, of t * h * w rows of `pixel_values`, else each entry of these, also after
    a batch dimension of 1 before [tiles, 3, H, W].
    """
    if sample.get("pixel_values") is None:
        return []
    shape = np.shape(sample["pixel_values"])
    if (grids := sample.get("image_grid_thw")) is not None:
        return (np.asarray(grids, dtype=np.int64).reshape(-1, 3).prod(axis=1) * shape[-1]).tolist()
    entries, *each = shape[1:] if len(shape) == 5 else shape
    return [math.prod(each)] * entries
