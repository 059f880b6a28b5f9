"""Samples of given lengths, cut from a text one after the other, and minibatches of published lengths, scaled down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odc_triton.jobs.data.dataset import DataSummary, TokenizedDataset
from odc_triton.tools.simulate.study import NAMED, draw, named_lengths

POPULATION = 20_000
LEAST_TOKENS = 2  # of a sample: one to predict, and one to predict it from


def cut(text: np.ndarray, lengths: Sequence[int], *, spans: np.ndarray | None = None) -> TokenizedDataset:
    """Samples of so many tokens, the first from the beginning of `text` [tokens]. `spans` [spans, 2]: of the tokens
    that are learned; by default all of them are.

    Raises ValueError for a text that is too short.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    if total > len(text):
        raise ValueError(f"the samples have {total} tokens, the text {len(text)}: give a longer text or fewer samples")
    count = len(lengths)
    targets = total - count if spans is None else int(np.diff(spans).sum())
    summary = DataSummary(records=count, samples=count, tokens=total, target_tokens=targets)
    spans = np.stack([offsets[:-1], offsets[1:]], axis=1) if spans is None else spans
    return TokenizedDataset(text[:total].astype(np.int32), offsets, spans, summary)


def scaled_minibatches(
    name: str, *, longest: int, samples: int, minibatches: int, seed: int = 0
) -> tuple[list[int], list[list[int]]]:
    """Lengths of all samples, and the samples of each minibatch, in order, `samples` in each.

    `name`: in `NAMED`; lengths are scaled so that its longest has `longest` tokens.
    """
    scale = longest / NAMED[name].longest
    population = [max(LEAST_TOKENS, round(length * scale)) for length in named_lengths(name, POPULATION)]
    drawn = draw(population, samples=samples, minibatches=minibatches, seed=seed)
    lengths = [length for minibatch in drawn for length in minibatch]
    return lengths, [list(range(first, first + samples)) for first in range(0, len(lengths), samples)]
