"""Several data sets as one, for a sampler and a collate function, without copying samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .dataset import Samples


class Mixture(Samples):
    """Samples of several data sets, one set after the other.

    A set with n copies has its samples n times, one copy after the other (numbered by `order.Mix`). It stores
    nothing per sample; `lengths` and `target_counts` are computed on access.
    """

    def __init__(self, sets: Sequence[Samples], copies: Sequence[int] | None = None) -> None:
        self.sets = list(sets)
        self.copies = [1] * len(self.sets) if copies is None else list(copies)
        self._ends = np.cumsum([len(each) * n for each, n in zip(self.sets, self.copies, strict=True)])

    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([np.tile(each.lengths, n) for each, n in zip(self.sets, self.copies, strict=True)])

    @property
    def target_counts(self) -> np.ndarray:
        return np.concatenate([np.tile(each.target_counts, n) for each, n in zip(self.sets, self.copies, strict=True)])

    @property
    def largest_token(self) -> int:
        return max(each.largest_token for each in self.sets)

    def _of_pictures(self, name: str) -> list | None:
        values = [each._of_pictures(name) for each in self.sets]
        if all(each is None for each in values):
            return None
        without = {"values": [], "floors": 0}[name]
        own = ([without] * len(one) if each is None else each for one, each in zip(self.sets, values, strict=True))
        return [value for each, n in zip(own, self.copies, strict=True) for value in each * n]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _sample(self, index: int) -> dict[str, np.ndarray]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        begin = int(self._ends[which - 1]) if which else 0
        return self.sets[which][(index - begin) % len(self.sets[which])]

    def undecoded(self) -> Mixture:
        return Mixture([each.undecoded() for each in self.sets], self.copies)
