"""What a pack holds: samples, and segments of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` up to, not including, `stop` of a sample.

    sample: its number.
    parent: of the first segment of a branch, the sample that it branches from: that begins with the same `start` tokens
        and computes token `start` - 1. None: the segment before this one is of the same sample.
    length: the sample's tokens, in a collated pack.

    Raises ValueError if it is empty, or no branch.
    """

    sample: int
    start: int
    stop: int
    parent: int | None = None
    length: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"{self!r} has no tokens: give 0 <= start < stop")
        if self.parent is not None and (self.start == 0 or self.parent == self.sample):
            raise ValueError(f"{self!r} can't branch there: give another sample as parent, and a start above 0")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"tokens {self.start}..{self.stop - 1} of sample {self.sample}"


Entry = int | Segment  # of a pack: an unsplit sample, or a segment of one


def number_of(entry: Entry) -> int:
    """The number of an entry's sample."""
    return entry.sample if isinstance(entry, Segment) else entry


def begins(entry: Entry) -> bool:
    """True for an unsplit sample, and for the first segment of one: each sample has one such entry."""
    return not isinstance(entry, Segment) or entry.start == 0 or entry.parent is not None


def named(entry: Entry, names: Sequence[int]) -> Entry:
    """The same with `names` of the samples instead of their numbers."""
    if isinstance(entry, int):
        return names[entry]
    parent = None if entry.parent is None else names[entry.parent]
    return replace(entry, sample=names[entry.sample], parent=parent)


def bounds_on_host(ends: Any, length: int) -> list[int]:
    """The documents' bounds on the host, from 0 to `length`."""
    bounds = list(getattr(ends, "_odc_bounds", None) or ends.tolist())
    if bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
        raise ValueError(f"cu_seq_lens_q must rise from 0 to B * T = {length}, but is {bounds}.")
    return bounds
