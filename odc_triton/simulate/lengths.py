"""Sequence lengths: of a file, or drawn from a distribution that stands for a published data set."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

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


def read_lengths(path: str | Path) -> tuple[list[int], str]:
    """Tokens of each sequence of a file, and in words how they were found.

    - `.npz` of a prepared data set (its `offsets`);
    - `.jsonl`: per line a number, or an object with `length` or `tokens` (a number), `input_ids` (a list), `text`, or
      `prompt` and `completion`. Of text the number of tokens is estimated: a token for every 4 bytes of UTF-8;
    - `.json`: a list of numbers; anything else: numbers apart by white space.

    Raises OSError where there is no such file, ValueError naming place and value of what is no length of 1 or more.
    """
    path = Path(path)
    estimated = False
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            if "offsets" not in arrays:
                raise ValueError(f"{path} has no `offsets`: give the file that `TokenizedDataset.save` wrote")
            values: list[object] = np.diff(arrays["offsets"]).tolist()
    else:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text: give .jsonl, .json, .npz, or numbers, one a line") from None
        if path.suffix == ".jsonl":
            records = [_parsed(path, n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
            estimated = any(isinstance(record, dict) and _text(record) is not None for record in records)
            values = [_of_record(path, n, record) for n, record in enumerate(records, 1)]
        elif path.suffix == ".json":
            values = _parsed(path, 1, text)
            if not isinstance(values, list):
                raise ValueError(f"{path} holds a {type(values).__name__}: give a list of lengths")
        else:
            values = text.split()
    lengths = [_checked(path, place, value) for place, value in enumerate(values, 1)]
    if not lengths:
        raise ValueError(f"{path} is empty: give the length of at least one sequence")
    how = f"{len(lengths)} sequences of {path}"
    if estimated:
        how += f", estimated at {_BYTES_PER_TOKEN} bytes a token (give `length` per line to have them exact)"
    return lengths, how


def _parsed(path: Path, line: int, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {line} is no JSON ({error.msg}): {text[:60]!r}") from None


def _text(record: dict) -> str | None:
    if any(name in record for name in ("length", "tokens", "input_ids")):
        return None
    if "text" in record:
        return str(record["text"])
    if "prompt" in record and "completion" in record:
        return f"{record['prompt']}{record['completion']}"
    return None


def _of_record(path: Path, number: int, record: object) -> object:
    if not isinstance(record, dict):
        return record
    text = _text(record)
    if text is not None:
        return -(-len(text.encode()) // _BYTES_PER_TOKEN)
    for name in ("length", "tokens", "input_ids"):
        if name in record:
            return len(record[name]) if isinstance(record[name], list) else record[name]
    raise ValueError(
        f"{path}, record {number} has {', '.join(record) or 'nothing'}: give `length`, `input_ids`, `text`, or "
        "`prompt` and `completion`"
    )


def _checked(path: Path, place: int, value: object) -> int:
    try:
        length = float(value) if not isinstance(value, bool) else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError):
        length = math.nan
    if not (math.isfinite(length) and length >= 1 and length == int(length)):
        raise ValueError(f"{path}, sequence {place} has length {value!r}: a length is a whole number of 1 or more")
    return int(length)


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
