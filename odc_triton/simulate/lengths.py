"""Sequence lengths: of a file, or drawn from a distribution that stands for a published data set."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from ..data.lengths import LEAST, read_lengths
from ..data.records import Record, message_text

_OVER = 0.01  # the share of an untruncated distribution beyond its longest sequence: an assumption, see `Lengths`
_BYTES_PER_TOKEN = 4  # of English text and code under tokenizers of 100,000 and more tokens


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A log-normal distribution of tokens per sequence, cut off at `longest`.

    Its mean is the published one. A mean and a maximum don't fix a shape, so one thing is assumed: 1% of the
    distribution lies beyond the maximum before it is cut off.
    """

    mean: float
    longest: int
    source: str


NAMED = {
    "longalign": Lengths(mean=16_500, longest=65_536, source="mean and longest (64K): arXiv 2601.19362"),
    "swe-smith": Lengths(mean=34_700, longest=131_072, source="mean: arXiv 2601.19362; longest (128K): assumed"),
    "aime": Lengths(mean=9_000, longest=32_768, source="mean (about 9K): arXiv 2601.19362; longest (32K): assumed"),
}


def named_lengths(name: str, count: int, *, seed: int = 0) -> list[int]:
    """`count` lengths in tokens of `NAMED[name]`. Raises ValueError for another name or a count below 1."""
    if name not in NAMED:
        raise ValueError(f"lengths {name!r} are not known: give one of {', '.join(NAMED)}, or a file")
    if count < 1:
        raise ValueError(f"count is {count}: draw 1 length or more")
    mu, sigma = log_normal(NAMED[name])
    normal, longest = NormalDist(mu, sigma), NAMED[name].longest
    generator = random.Random(seed)
    inside = normal.cdf(math.log(longest))
    return [
        max(1, min(longest, round(math.exp(normal.inv_cdf(generator.uniform(1e-12, inside)))))) for _ in range(count)
    ]


def log_normal(lengths: Lengths) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm that fulfil what `Lengths` says."""
    top, z = math.log(lengths.longest), NormalDist().inv_cdf(1 - _OVER)

    def mean(sigma: float) -> float:
        mu = top - z * sigma
        return math.exp(mu + sigma**2 / 2) * NormalDist().cdf(z - sigma) / (1 - _OVER)

    low, high = 1e-3, 3.0  # the mean falls as sigma grows
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) > lengths.mean else (low, middle)
    return top - z * low, low


def lengths_of_file(path: str | Path) -> tuple[list[int], str]:
    """Tokens of each sequence of a file, as `read_lengths` reads it, and in words where they are from.

    Of a text they are estimated: a token for every 4 bytes of UTF-8. Raises as `read_lengths`.
    """
    texts = 0

    def estimate(record: Record) -> int:
        nonlocal texts
        texts += 1
        parts = [message_text(each) for each in record.messages or ()] + [record.prompt or "", record.completion]
        size = sum(len(part.encode()) for part in parts)
        return max(-(-size // _BYTES_PER_TOKEN), LEAST) if size else 0

    lengths = read_lengths(path, count_tokens=estimate)
    how = f"{len(lengths)} sequences of {path}"
    if texts:
        how += f", estimated at {_BYTES_PER_TOKEN} bytes a token (give `length` per line to have them exact)"
    return lengths, how


def draw(lengths: Sequence[int], *, samples: int, minibatches: int, seed: int = 0) -> list[list[int]]:
    """`minibatches` lists of `samples` lengths each, without repetition within one, from shuffled passes.

    Raises ValueError where there are fewer lengths than `samples`.
    """
    if len(lengths) < samples:
        raise ValueError(
            f"{len(lengths)} sequences cannot fill a minibatch of {samples} (ranks x samples per rank): give more "
            "sequences, fewer --gpus, or a smaller --minibatch"
        )
    generator = random.Random(seed)
    drawn: list[list[int]] = []
    while len(drawn) < minibatches:
        order = list(lengths)
        generator.shuffle(order)
        drawn += [order[i : i + samples] for i in range(0, len(order) - samples + 1, samples)]
    return drawn[:minibatches]
