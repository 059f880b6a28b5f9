"""One minibatch's plan, the same on every rank, and a rank's part of it."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from .entries import Entry, Segment, begins, number_of
from .packing import packed
from .samples import Samples
from .segments import Groups, PacksOfRanks, SplitPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Who computes what in one minibatch. A process that gets it pickled has all but the rows and the packs.

    ready: by rank, microbatches in the order in which it computes them, an empty one where it has no part in a wave.
    unpacked: by rank, places of samples that it packs itself, and computes after those.
    queue: packs that ranks take at run time after those; None if there is no queue.
    samples: whose places these are; None if they are unknown.
    token_cap: the most tokens of a pack of `unpacked`.
    ready_cost: of `ready`, on the slowest rank, where it is known.
    split: who computes which part of what several ranks compute; None if no rank needs what another computes.
    estimate: the step's cost; infinite where it is not compared.
    checksum: of the samples, None if they are unknown: ranks with another one have other samples.
    """

    ready: Sequence[Sequence[list[Entry]]]
    unpacked: Sequence[Sequence[int]] | None = None
    queue: list[list[Entry]] | None = None
    samples: Samples | None = None
    token_cap: int = 0
    ready_cost: float = 0.0
    split: SplitPlan | None = None
    estimate: float = math.inf
    checksum: int | None = None

    @classmethod
    def by_hand(
        cls, ready: PacksOfRanks, *, replicas: int = 1, contents: str = "", groups: Groups | None = None
    ) -> Plan:
        """A plan of all ranks' packs, without a sampler.

        ready: by rank, its packs in order.
        replicas: consecutive ranks of equal number that share memory.
        contents: a hash of the tokens that samples share.
        groups: by sample, the number of its group.

        Raises ValueError for a sample that is there twice, and for segments that don't fit together.
        """
        ready = [[[e if isinstance(e, Segment) else operator.index(e) for e in pack] for pack in own] for own in ready]
        whole = Counter(e for own in ready for pack in own for e in pack if not isinstance(e, Segment))
        if twice := [sample for sample, count in whole.items() if count > 1]:
            raise ValueError(f"sample {twice[0]} is there twice: each sample is in one pack of one rank")
        return cls(ready=ready, split=SplitPlan.of(ready, replicas=replicas, contents=contents, groups=groups))

    @cached_property
    def digest(self) -> str:
        """Of all ranks' packs and segments: ranks with another one assign their samples in another way."""
        self._require_packs()
        split = None if self.split is None else self.split.digest
        return sha256(repr((self.ready, self.unpacked, self.queue, split)).encode()).hexdigest()[:16]

    @cached_property
    def count(self) -> int:
        """The number of samples; 0 if it is unknown."""
        return 0 if self.samples is None else len(self.samples.tokens)

    @cached_property
    def ranks(self) -> int:
        return len(self.ready)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"digest": self.digest, "count": self.count, "ranks": self.ranks}
        return vars(self) | kept | {"ready": None, "unpacked": None, "queue": None, "samples": None}

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def _require_packs(self) -> None:
        if self.ready is None:
            raise RuntimeError("this plan was pickled, without its packs: ask the process that made it")

    def packs(self, rank: int) -> MinibatchPacks:
        """That rank's microbatches; of a queue, those before the ones that it takes. Raises IndexError for another."""
        self._require_packs()
        if not 0 <= rank < self.ranks:
            raise IndexError(f"the plan is of ranks 0 to {self.ranks - 1}, and rank is {rank}")
        made = MinibatchPacks([*filter(None, self.ready[rank]), *self._packed(rank)], plan=self, rank=rank)
        made.tokens = self.targets(number_of(each) for pack in made for each in pack if begins(each))
        return made

    def targets(self, names: Iterable[int]) -> int | None:
        """The targets of the samples with these `names`; None if they are unknown."""
        if self.samples is None or self.samples.learned is None:
            return None
        learned = dict(zip(self.samples.names, self.samples.learned, strict=True))
        return sum(int(learned[name]) for name in names)

    def _packed(self, rank: int) -> list[list[Entry]]:
        if self.unpacked is None or self.samples is None or not (own := self.unpacked[rank]):
            return []
        tokens, prices = [self.samples.tokens[at] for at in own], [self.samples.prices[at] for at in own]
        return [[self.samples.names[own[at]] for at in pack] for pack in packed(tokens, prices, self.token_cap)]


class MinibatchPacks(list):
    """One rank's packs of a minibatch, or what was made of them.

    They survive a DataLoader's workers, pickling and pinning, also on a rank without packs; accelerate's loaders make
    plain lists of them.

    packs: lists of samples' numbers, or collated packs.
    plan: of all ranks, None if it is unknown.
    rank: whose they are.
    tokens: the rank's targets, None if they are unknown.
    """

    plan: Plan | None = None
    rank: int | None = None
    tokens: int | None = None

    def __init__(
        self, packs: Iterable[Any] = (), *, plan: Plan | None = None, rank: int | None = None, tokens: int | None = None
    ) -> None:
        super().__init__(packs)
        self.plan, self.rank, self.tokens = plan, rank, tokens

    @classmethod
    def like(cls, others: Sequence[Any], packs: Iterable[Any]) -> MinibatchPacks:
        """`packs` that were made of `others`, which may be a plain list."""
        return cls(packs, **{name: getattr(others, name, None) for name in ("plan", "rank", "tokens")})

    @property
    def split(self) -> SplitPlan | None:
        """The plan of all ranks' segments, None if no pack needs another."""
        return None if self.plan is None else self.plan.split

    @property
    def samples(self) -> int:
        """Of all ranks; 0 if unknown."""
        return 0 if self.plan is None else self.plan.count

    @property
    def checksum(self) -> int | None:
        """Of these samples, the same on all ranks; None if unknown."""
        return None if self.plan is None else self.plan.checksum
