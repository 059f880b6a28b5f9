"""Some of a data set's samples, and which of them are held out to evaluate on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from odc_triton.train.data import TokenizedDataset


class Samples:
    """The samples `indices` of a data set, in that order: what a sampler and a collate function need of one."""

    def __init__(self, data: TokenizedDataset, indices: Sequence[int] | None = None) -> None:
        """All samples without `indices`."""
        self._data = data
        self._indices = np.arange(len(data)) if indices is None else np.asarray(indices, np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64: tokens of each."""
        return self._data.lengths[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._data[int(self._indices[index])]


def hold_out(data: TokenizedDataset, *, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """(to learn, to evaluate on), by `seed` alone: the same on every rank. At least one sample is held out.

    Raises ValueError where nothing would be left to learn.
    """
    count = max(round(len(data) * fraction), 1)
    if count >= len(data):
        raise ValueError(f"eval_fraction {fraction} of {len(data)} samples leaves none to learn: lower it")
    # Only Random.random is promised to give the same numbers in every Python.
    generator = random.Random(f"{seed} hold out")
    order = sorted(range(len(data)), key=[generator.random() for _ in range(len(data))].__getitem__)
    return Samples(data, sorted(order[count:])), Samples(data, sorted(order[:count]))
