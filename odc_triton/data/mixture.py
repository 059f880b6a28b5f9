"""Several data sets as one: what a sampler and a collate function read, without a copy of any sample."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from .dataset import SampleSubset, TokenizedDataset


class Mixture:
    """Samples of several data sets, one set after the other.

    A set with n copies has its samples n times, one copy after the other (see `order.Mix`, which numbers them
    so). Per sample it holds nothing; `lengths` and `target_counts` are made when asked for.
    """

    def __init__(self, sets: Sequence[TokenizedDataset | SampleSubset], copies: Sequence[int] | None = None) -> None:
        self.sets = list(sets)
        self.copies = [1] * len(self.sets) if copies is None else list(copies)
        self._ends = np.cumsum([len(each) * n for each, n in zip(self.sets, self.copies, strict=True)])

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64: tokens of each sample, prompt included."""
        return np.concatenate([np.tile(each.lengths, n) for each, n in zip(self.sets, self.copies, strict=True)])

    @property
    def target_counts(self) -> np.ndarray:
        """[samples] int64: tokens of each sample that are predicted and learned."""
        return np.concatenate([np.tile(each.target_counts, n) for each, n in zip(self.sets, self.copies, strict=True)])

    @property
    def largest_token(self) -> int:
        """The largest token id of all samples."""
        return max(each.largest_token for each in self.sets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """As for one data set."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a mixture of {len(self)}")
        index %= len(self)
        which = int(np.searchsorted(self._ends, index, side="right"))
        begin = int(self._ends[which - 1]) if which else 0
        return self.sets[which][(index - begin) % len(self.sets[which])]
