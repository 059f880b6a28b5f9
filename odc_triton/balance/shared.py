"""Samples that share tokens, assigned to ranks: in each pack the tokens that several share are computed once.

Three ways are tried, and the one with the least estimate wins: all relatives on one rank; samples in the order of their
tokens laid end to end and cut into one part per rank, of which only those at a cut repeat what their part shares with
the one before; and LB-Mini, which knows no relatives, but has whichever are in one pack share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .cost import CostModel
from .packing import best_fit_decreasing, checked_lengths, pack
from .partition import balanced_partition
from .pieces import Entry, Piece
from .relatives import Relatives

_HALVINGS = 12  # of the range in which the least load of the fullest rank is searched

Members = list[list[list[int]]]  # by rank and pack, the samples


@dataclass(frozen=True, slots=True)
class SharedAssignment:
    """`packs`: of each rank, costliest first. `estimate`: the step's cost."""

    packs: list[list[list[Entry]]]
    estimate: float


def assign_shared(
    lengths: Sequence[int], relatives: Relatives, *, ranks: int, token_cap: int, cost: CostModel
) -> SharedAssignment:
    """Assigns samples of `lengths` tokens to `ranks`.

    Deterministic: every rank that calls it with the same arguments gets the same result. Raises as `checked_lengths`.
    """
    problem = _SharedProblem(checked_lengths(lengths, token_cap), relatives, ranks, token_cap, cost)
    together, alone = problem.together(), problem.alone()
    found = [problem.priced(members) for members in (together, alone)]
    low, high = problem.even_share, min(each.estimate for each in found)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if (members := problem.filled(middle)) is None:
            low = middle
        else:
            found.append(problem.priced(members))
            high = min(middle, found[-1].estimate)
    return min(found, key=lambda each: each.estimate)


@dataclass(frozen=True, slots=True)
class _PricedSample:
    """The cost and the tokens of a sample, whole, and as a branch of the one before it in its family."""

    number: int
    whole: tuple[float, int]
    branch: tuple[float, int]


class _SharedProblem:
    def __init__(
        self, lengths: Sequence[int], relatives: Relatives, ranks: int, token_cap: int, cost: CostModel
    ) -> None:
        self.lengths, self.relatives, self.ranks = lengths, relatives, ranks
        self.token_cap, self.cost = token_cap, cost
        self.families = [
            [
                _PricedSample(
                    i, (cost.sequence(lengths[i]), lengths[i]), (cost.piece(start, lengths[i]), lengths[i] - start)
                )
                for i, start in family
            ]
            for family in relatives.families()
        ]
        self.costs = [math.fsum(each.branch[0] for each in family) for family in self.families]  # the first has start 0
        self.even_share = math.fsum(self.costs) / ranks

    def together(self) -> Members:
        """Relatives on one rank, and in one pack as far as the cap allows."""
        parts: list[list[_PricedSample]] = []
        for family in self.families:
            tokens = math.inf
            for each in family:
                if tokens + each.branch[1] > self.token_cap:
                    parts.append([])
                    tokens = each.whole[1] - each.branch[1]
                parts[-1].append(each)
                tokens += each.branch[1]
        costs = [part[0].whole[0] + math.fsum(each.branch[0] for each in part[1:]) for part in parts]
        tokens = [part[0].whole[1] + sum(each.branch[1] for each in part[1:]) for part in parts]
        members = []
        for own in balanced_partition(costs, self.ranks):
            packs = best_fit_decreasing([tokens[at] for at in own], token_cap=self.token_cap) if own else []
            members.append([[each.number for at in places for each in parts[own[at]]] for places in packs])
        return members

    def alone(self) -> Members:
        """As LB-Mini."""
        members = []
        for own in balanced_partition([self.cost.sequence(tokens) for tokens in self.lengths], self.ranks):
            packs = pack([self.lengths[i] for i in own], token_cap=self.token_cap, cost=self.cost) if own else []
            members.append([[own[at] for at in places] for places in packs])
        return members

    def filled(self, most: float) -> Members | None:
        """Ranks filled one after the other with at most `most` cost, costly families first; None if they don't do."""
        members: Members = [[]]
        load, tokens = 0.0, math.inf
        for family in sorted(range(len(self.families)), key=lambda at: -self.costs[at]):
            shares = False
            for each in self.families[family]:
                price, count = each.branch if shares else each.whole
                if tokens + count > self.token_cap:
                    price, count = each.whole[0] + self.cost.microbatch, math.inf
                if load + price > most * (1 + 1e-9):
                    members.append([])
                    load, price, count = 0.0, each.whole[0] + self.cost.microbatch, math.inf
                    if len(members) > self.ranks or price > most * (1 + 1e-9):
                        return None
                if count == math.inf:
                    members[-1].append([])
                    tokens, count = 0, each.whole[1]
                members[-1][-1].append(each.number)
                load, tokens, shares = load + price, tokens + count, True
        return members + [[] for _ in range(self.ranks - len(members))]

    def priced(self, members: Members) -> SharedAssignment:
        packs_of_ranks, estimate = [], 0.0
        for packs in members:
            priced = [(self._price(entries), entries) for entries in map(self.relatives.entries, packs)]
            priced.sort(key=lambda it: -it[0])
            packs_of_ranks.append([entries for _, entries in priced])
            estimate = max(estimate, math.fsum(price + self.cost.microbatch for price, _ in priced))
        return SharedAssignment(packs_of_ranks, estimate)

    def _price(self, entries: Sequence[Entry]) -> float:
        parts = [each if isinstance(each, Piece) else Piece(each, 0, self.lengths[each]) for each in entries]
        return math.fsum(self.cost.piece(each.start, each.stop) for each in parts)
