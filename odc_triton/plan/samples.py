"""Samples as they are assigned: rows, checked and priced once. And what they are assigned to."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from .cost import CostModel
from .packing import checked_lengths

if TYPE_CHECKING:
    from .relatives import Relatives  # which needs numpy


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Ranks, and what they hold.

    ranks: their number.
    token_cap: the most tokens of a microbatch.
    replicas: consecutive ranks of equal number, which split samples among themselves.
    split_tokens: of each rank, the most tokens whose keys and values others may read; 0: no sample is split.
    shared_tokens: the same for samples that share a prefix, by default `split_tokens`.
    split_cuts: of each rank, the most places in a minibatch at which others go on, whose states a hybrid keeps; None:
        no limit.

    Raises ValueError for a value out of range.
    """

    ranks: int
    token_cap: int
    replicas: int = 1
    split_tokens: int = 0
    shared_tokens: int | None = None
    split_cuts: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}: give the number of ranks, 1 or more")
        if self.replicas < 1 or self.ranks % self.replicas:
            raise ValueError(f"replicas is {self.replicas}: give a divisor of the {self.ranks} ranks")
        if min(self.split_tokens, self.readable) < 0:
            tokens = min(self.split_tokens, self.readable)
            raise ValueError(f"tokens is {tokens}: give the tokens per rank that others may read, 0 or more")
        if self.split_cuts is not None and self.split_cuts < 0:
            raise ValueError(f"split_cuts is {self.split_cuts}: give the cuts per rank, 0 or more, or None")
        if not self.token_cap >= 1:  # NaN too
            raise ValueError(
                f"token_cap is {self.token_cap}: give the most tokens that one microbatch may hold, 1 or more"
            )

    @property
    def shards(self) -> int:
        """The ranks of one replica."""
        return self.ranks // self.replicas

    @property
    def readable(self) -> int:
        """`shared_tokens`, or its default."""
        return self.split_tokens if self.shared_tokens is None else self.shared_tokens

    @property
    def cuts(self) -> float:
        """`split_cuts`, infinite without a limit."""
        return math.inf if self.split_cuts is None else self.split_cuts

    def of_replica(self) -> Limits:
        """Those of one replica's ranks."""
        return replace(self, ranks=self.shards, replicas=1)

    def checked(self, tokens: Sequence[int]) -> list[int]:
        """The `tokens` of samples that can be assigned. Raises ValueError for some below 1 or over the cap."""
        return checked_lengths(tokens, self.token_cap, ranks=self.shards if self.split_tokens else 1)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The columns of some samples; None: unknown, or nothing.

    tokens: of each sample.
    prices: its cost.
    cost: the model that they are by.
    names: its number in packs.
    learned: how many of its tokens are targets.
    earliest_cuts: its tokens up to its last image's, in which no segment begins.
    extra: what its images cost, in the units of `cost`.
    prefixes: the tokens that they share.
    groups: the number of its group, or None; a group's, whose losses need each other, are in one pack, or over ranks in
        one wave.
    """

    tokens: list[int]
    prices: list[float]
    cost: CostModel
    names: Sequence[int]
    learned: Sequence[int] | None = None
    earliest_cuts: Sequence[int] | None = None
    extra: Sequence[float] | None = None
    prefixes: Relatives | None = None
    groups: Sequence[int | None] | None = None

    @classmethod
    def of(
        cls,
        tokens: list[int],
        cost: CostModel,
        *,
        names: Sequence[int] | None = None,
        learned: Sequence[int] | None = None,
        earliest_cuts: Sequence[int] | None = None,
        extra: Sequence[float] | None = None,
        prefixes: Relatives | None = None,
        groups: Sequence[int | None] | None = None,
    ) -> Samples:
        """Samples with their prices by `cost`.

        tokens: as `Limits.checked` returns them, maybe none.
        names: by default their places.
        cost, learned, earliest_cuts, extra, prefixes, groups: as of `Samples`.

        Raises ValueError for columns that don't fit.
        """
        if prefixes is not None and prefixes.lengths != tokens:
            raise ValueError(
                f"`relatives` is of {len(prefixes.lengths)} samples, and the lengths of these {len(tokens)} are others:"
                " give find_relatives of the same data set"
            )
        prices = cost.samples(tokens, extra)
        cuts = [0] * len(tokens) if earliest_cuts is None else earliest_cuts
        for cut, length in zip_longest(cuts, tokens, fillvalue=-1):
            if not 0 <= cut <= length:
                raise ValueError(
                    f"one of {len(cuts)} `floors` for {len(tokens)} samples is {cut}, of {length} tokens: give each "
                    "sample's tokens up to its last image's, 0 without images"
                )
        return cls(
            tokens=tokens,
            prices=prices,
            cost=cost,
            names=range(len(tokens)) if names is None else names,
            learned=None if learned is None else _checked_targets(learned, tokens),
            earliest_cuts=earliest_cuts,
            extra=extra,
            prefixes=prefixes,
            groups=None if groups is None else _checked_groups(groups, len(tokens)),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def some(self, places: Sequence[int]) -> Samples:
        """Those at different `places`, in that order."""

        def of(column: Sequence[Any] | None) -> Any:
            return None if column is None else [column[place] for place in places]

        return Samples(
            tokens=of(self.tokens),
            prices=of(self.prices),
            cost=self.cost,
            names=of(self.names),
            learned=of(self.learned),
            earliest_cuts=of(self.earliest_cuts),
            extra=of(self.extra),
            prefixes=None if self.prefixes is None else self.prefixes.among(places),
            groups=of(self.groups),
        )

    @property
    def checksum(self) -> int:
        """Of names and tokens, equal on ranks that assign the same samples."""
        return zlib.crc32(repr([*zip(self.names, self.tokens, strict=True)]).encode())


def _checked_targets(targets: Sequence[int], tokens: list[int]) -> list[int]:
    if len(targets) != len(tokens):
        raise ValueError(f"targets has {len(targets)} numbers for {len(tokens)} samples: give one for each")
    try:
        found = [operator.index(each) for each in targets]
    except TypeError as error:
        raise ValueError(f"targets must be whole numbers: {error}") from None
    for at, (each, most) in enumerate(zip(found, tokens, strict=True)):
        if not 0 <= each < most:
            raise ValueError(
                f"targets[{at}] is {each}, of {most} tokens: give of each sample its learned tokens but its first, "
                "which nothing predicts"
            )
    return found


def _checked_groups(groups: Sequence[int | None], count: int) -> list[int | None]:
    if len(groups) != count:
        raise ValueError(f"groups has {len(groups)} numbers for {count} samples: give one for each, or None")
    try:
        return [None if each is None else operator.index(each) for each in groups]
    except TypeError as error:
        raise ValueError(f"groups must be whole numbers, or None: {error}") from None
