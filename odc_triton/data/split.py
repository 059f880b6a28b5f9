"""Some samples set aside, by seed: for evaluation.

Which ones depends on the seed and the number of samples only: not on ranks, world size, epochs or the order in
which a sampler takes the others.
"""

from __future__ import annotations

import operator
import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .dataset import TokenizedDataset


class SampleSubset:
    """Some samples of a data set, in its order: what a sampler and a collate function read, without a copy."""

    def __init__(self, data: TokenizedDataset, indices: np.ndarray) -> None:
        """`indices`: [samples] int64, ascending, of `data`."""
        self.data, self.indices = data, indices

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64: tokens of each sample, prompt included."""
        return self.data.lengths[self.indices]

    @property
    def target_counts(self) -> np.ndarray:
        """[samples] int64: tokens of each sample that are predicted and learned."""
        return self.data.target_counts[self.indices]

    @property
    def largest_token(self) -> int:
        """The largest token id of all samples, those left out here included."""
        return self.data.largest_token

    @property
    def summary(self) -> str:
        """Counts, to be printed. What was truncated or dropped is in the whole data set's."""
        tokens, targets = int(self.lengths.sum()), int(self.target_counts.sum())
        return f"{len(self)} of {len(self.data)} samples, {tokens} tokens, {targets} of them learned"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """As of the data set."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a subset of {len(self)}")
        return self.data[int(self.indices[index])]


def split_samples(data: TokenizedDataset, evaluation: float, *, seed: int = 0) -> tuple[SampleSubset, SampleSubset]:
    """(to train on, to evaluate on), disjoint, together all.

    `evaluation` is a number of samples, 1 or more, or a fraction below 1 (rounded, at least one sample). Raises
    ValueError if a part would be empty.
    """
    total = len(data)
    if not evaluation > 0 or (evaluation >= 1 and evaluation != int(evaluation)):
        raise ValueError(
            f"the evaluation split is {evaluation!r}; give a number of samples, 1 or more, or a fraction below 1"
        )
    count = int(evaluation) if evaluation >= 1 else max(round(evaluation * total), 1)
    if count >= total:
        raise ValueError(
            f"an evaluation split of {evaluation!r} would take {count} of {total} samples and leave none to train "
            "on; make it smaller, or give more data"
        )
    # Only Random.random is promised to give the same numbers in every Python, and numpy's generators are not.
    generator = random.Random(f"evaluation {seed}")
    keys = np.fromiter((generator.random() for _ in range(total)), np.float64, total)
    aside = np.zeros(total, bool)
    aside[np.argsort(keys, kind="stable")[:count]] = True
    return SampleSubset(data, np.flatnonzero(~aside)), SampleSubset(data, np.flatnonzero(aside))
