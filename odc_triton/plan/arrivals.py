"""Completions assigned to ranks as they come: while some ranks still sample, others compute.

[Note: one log] All ranks read the same messages in the same order (`counter.Log`): a group of completions has come, a
rank is free. Which rank computes what is a function of the messages so far. So every rank knows it, nobody decides it,
and each completion is computed once: a rank that is free gets a pack of the costliest that have come, and waits for the
next message if there is none.

[Note: size of a pack] With R ranks a pack has up to 1 / 2R of the cost that is left, of groups that have not come as
well: large packs first, small ones at the end, so that ranks end together. One rank takes all that fits.
What the completions of a group share is computed in each pack that has some of them. So while as many groups as ranks
are left a pack has the costliest one whole, later at least as much of it as makes that a small part. It takes other
groups that share only whole.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .cost import CostModel

_SMALLEST = 16  # a pack is not cut below this fraction of the cap: its microbatch would take no less time
_OF_SHARED = 4  # nor below this multiple of the cost of what its completions share


@dataclass
class _Group:
    """Completions of one prompt: (number, tokens), the longest first; `shared`: of their tokens, those that a pack
    computes once.
    """

    members: deque[tuple[int, int]]
    shared: int
    left: float  # cost of the members together, and of `shared`

    @property
    def tokens(self) -> int:
        """Of all members, in one pack."""
        return self.shared + sum(stop - self.shared for _, stop in self.members)


@dataclass(kw_only=True)
class Arrivals:
    """`left`: groups that have not come. `packs`: by rank, the numbers of completions that it is to compute next.

    `keeps`: what no rank has begun when the last group comes is `rest`, which ranks assign in another way, if packs of
    it would be too coarse. Else it is not, as such an assignment does not know how much ranks still have to compute.
    A group that has a completion over `token_cap` is `rest` in any case.
    """

    ranks: int
    left: int
    token_cap: int
    cost: CostModel
    keeps: bool = False
    rest: dict[int, int] = field(default_factory=dict)  # tokens by number

    def __post_init__(self) -> None:
        self.packs: list[deque[list[int]]] = [deque() for _ in range(self.ranks)]
        self._free: deque[int] = deque()
        self._pool: list[_Group] = []
        self._came, self._cost = 0, 0.0  # groups so far, and their cost

    @property
    def is_over(self) -> bool:
        """No rank will get another pack."""
        return not self.left and not self._pool

    def came(self, lengths: Mapping[int, int], shared: int = 0) -> None:
        """A group has come. `lengths`: tokens of its completions by number, with the prompt's; maybe none. `shared`:
        the tokens with which all of them begin, if a pack computes those once.
        """
        self.left -= 1
        self._came += 1
        if self.keeps and max(lengths.values(), default=0) > self.token_cap:
            self.rest |= sorted(lengths.items())
        elif lengths:
            members = deque(sorted(lengths.items(), key=lambda it: (-it[1], it[0])))
            cost = self.cost.sequence(shared) + math.fsum(self.cost.segment(shared, each) for each in lengths.values())
            self._pool.append(_Group(members, shared, cost))
            self._cost += cost
        if self.keeps and not self.left and self._is_coarse():
            self.rest |= {number: tokens for group in self._pool for number, tokens in sorted(group.members)}
            self._pool.clear()
        self._assign()

    def is_free(self, rank: int) -> None:
        """That rank has computed all that it got."""
        self._free.append(rank)
        self._assign()

    def _assign(self) -> None:
        while self._free and self._pool:
            self.packs[self._free.popleft()].append(self._pack())

    def _is_coarse(self) -> bool:
        """True if a pack may cost more than an even part of what is left, so that segments are better; or if groups may
        share what is not known here.
        """
        most = math.fsum(group.left for group in self._pool) / self.ranks
        return any(not group.shared or self._least(group) > most for group in self._pool)

    def _least(self, group: _Group) -> float:
        """The cost of the smallest pack that begins with that group."""
        longest = self.cost.sequence(group.members[0][1])
        return max(longest, min(_OF_SHARED * self.cost.sequence(group.shared), group.left))

    def _pack(self) -> list[int]:
        to_come = self.left * self._cost / self._came
        most = (to_come + math.fsum(group.left for group in self._pool)) / (2 * self.ranks)
        most = math.inf if self.ranks == 1 else max(most, self.cost.sequence(self.token_cap // _SMALLEST))
        pack: list[int] = []
        tokens, cost = 0, 0.0
        self._pool.sort(key=lambda group: (-group.left, group.members[0]))
        are_many = self.left + len(self._pool) >= self.ranks
        first = self._pool[0]
        most = max(most, first.left if are_many and first.shared else self._least(first))
        for group in self._pool:
            fits = tokens + group.tokens <= self.token_cap and cost + group.left <= most
            if pack and group.shared and not fits:
                continue
            start = 0  # the first of a group in a pack is whole
            while group.members:
                number, stop = group.members[0]
                more = self.cost.segment(start, stop)
                if pack and not fits and (tokens + stop - start > self.token_cap or cost + more > most):
                    break
                group.members.popleft()
                pack.append(number)
                tokens, cost, start = tokens + stop - start, cost + more, group.shared
                group.left -= self.cost.segment(group.shared, stop)
        self._pool = [group for group in self._pool if group.members]
        return pack
