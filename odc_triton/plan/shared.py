"""Samples that share tokens, assigned to ranks: in each pack the tokens that several share are computed once.

Four ways are tried, and the one with the least estimate wins: each prefix group on one rank; samples in the order of
their tokens laid end to end and cut into one part per rank, where only the samples at a cut repeat what their part
shares with the one before; LB-Mini, which ignores prefixes when it assigns samples, but shares those within a pack; and
trees over ranks.

[Note: trees over ranks] Prefix groups are laid end to end on a line of cost, each tree depth first, and the line is cut
into one part per rank (line.py), which reads the others' keys and values instead of repeating their tokens. The
costliest groups are laid so, all or a half, a quarter, …, and the others assigned by the other ways, in the same
microbatches if all fit. Reading has a price that no estimate knows: it must be 5% better than the others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from .cuts import most_cuts
from .entries import Entry, Segment, named
from .line import LEAST_TOKENS, Strip, count_tokens, cut_line, lay_waves, price
from .packing import best_fit, packed
from .partition import BALANCED, balanced_partition
from .plan import Plan
from .relatives import Relatives
from .samples import Limits, Samples
from .segments import SplitPlan, apart_from_their_group

_HALVINGS = 12  # of the range in which the least load of the fullest rank is searched
_LEAST_GAIN = 0.05

Members = list[list[list[int]]]  # by rank and pack, the samples


@dataclass(frozen=True, slots=True)
class SharedAssignment:
    """`packs`: of each rank, its waves, then others, costliest first. `estimate`: the step's cost, raised by the gain
    that trees over ranks must have; infinite, without packs, if samples over the cap don't fit as these.
    """

    packs: list[list[list[Entry]]]
    estimate: float


def shared_plan(samples: Samples, limits: Limits, *, required: bool = True) -> Plan:
    """Assigns samples that share tokens. None is cut, and none branches, before its last image's last token.

    The extra cost is of a sample's first tokens, also where others share them. With `limits.readable` 0 no tree lies on
    several ranks. Deterministic: every rank gets the same result.

    Groups may share nothing. Raises ValueError, naming it, for a sample or group over the cap that can't be cut; if not
    `required`, the plan then has no packs and an infinite estimate.
    """
    relatives, extra = samples.prefixes or Relatives.none(samples.tokens, samples.earliest_cuts), samples.extra
    groups = {at: group for at, group in enumerate(samples.groups or ()) if group is not None}
    members: dict[object, list[int]] = {}
    for at in range(len(samples)):
        members.setdefault(groups.get(at, (at,)), []).append(at)
    families = [*map(relatives.strips, members.values())] if groups else relatives.families()
    if extra is not None:
        families = [[each._replace(extra=extra[each.sample]) for each in family] for family in families]
    problem = _SharedProblem(samples, relatives, families, limits, groups)
    found = problem.best() if limits.replicas == 1 else _over_replicas(problem)
    if required and found.estimate == math.inf:
        over = [at for at, is_over in enumerate(problem.over) if is_over]
        alone = (at for at in over if problem.of_replica([families[at]]).best().estimate == math.inf)
        family = families[at := next(alone, over[0])]
        longest = max(family, key=lambda each: each.stop).sample
        names = [str(samples.names[each.sample]) for each in family]
        of_samples = f", of samples {', '.join(names[:5])}{', …' * (len(names) > 5)},"
        group = groups.get(longest)
        named_so = f"sample {samples.names[longest]}" if group is None else f"group {group}{of_samples}"
        places = "" if limits.split_cuts is None else f" and go on at {limits.split_cuts} places"
        raise ValueError(
            f"{named_so} has {problem.needed[at]} tokens, over the token_cap of {limits.token_cap}, and can't be cut "
            f"over {limits.shards} ranks, of each of which others may read {limits.readable} tokens{places}, in "
            f"segments of {LEAST_TOKENS} or more: raise the cap or the tokens to read, or truncate or drop samples"
        )
    packs = [[[named(each, samples.names) for each in entries] for entries in of_rank] for of_rank in found.packs]
    by_name = {samples.names[at]: group for at, group in groups.items()}
    contents = hashlib.sha256("".join(relatives.contents).encode()).hexdigest()
    return Plan(
        samples=samples,
        ready=packs,
        estimate=found.estimate,
        split=SplitPlan.of(packs, replicas=limits.replicas, contents=contents, groups=by_name),
    )


def _over_replicas(problem: _SharedProblem) -> SharedAssignment:
    """The better of no trees over ranks, and of prefix groups assigned to the replicas by cost."""
    assigned = balanced_partition(problem.costs, problem.limits.replicas)
    parts = [problem.of_replica([problem.families[at] for at in places]).best() for places in assigned]
    joined = SharedAssignment([*chain.from_iterable(each.packs for each in parts)], max(e.estimate for e in parts))
    return min(problem.apart(), joined, key=lambda each: each.estimate)


@dataclass
class _SharedProblem:
    """A minibatch's samples by prefix group, or by the `groups` given, and the limits. `groups`: by sample."""

    samples: Samples
    relatives: Relatives
    families: list[list[Strip]]
    limits: Limits
    groups: dict[int, int]

    def __post_init__(self) -> None:
        self.ranks, self.token_cap, self.cost = self.limits.ranks, self.limits.token_cap, self.samples.cost
        self.lengths = self.samples.tokens
        self.strips = {each.sample: each for each in chain.from_iterable(self.families)}
        self.costs = [self._together(family) for family in self.families]
        self.even_share = math.fsum(self.costs) / self.ranks
        # Of all of a group, or of a prefix group's longest sample, as prefix groups may be in several packs.
        counts = ([e.stop - e.start * bool(self.groups) for e in family] for family in self.families)
        self.needed = [*map(sum if self.groups else max, counts)]
        self.over = [tokens > self.token_cap for tokens in self.needed]

    def of_replica(self, families: list[list[Strip]]) -> _SharedProblem:
        return replace(self, families=families, limits=self.limits.of_replica())

    def best(self) -> SharedAssignment:
        best = self.apart()
        if self.limits.readable and self.ranks > 1 and self.even_share < best.estimate * (1 - _LEAST_GAIN):
            best = min([best, *self.over_ranks()], key=lambda each: each.estimate)
        return best

    def apart(self) -> SharedAssignment:
        """The best whose ranks read nothing of each other."""
        if not self.families or any(self.over):
            return SharedAssignment([[] for _ in range(self.ranks)], math.inf if any(self.over) else 0.0)
        found = [self.priced(self.together())]  # which cuts no prefix group within the cap
        if self.groups:
            return found[0]
        found.append(self.priced(self.alone()))
        low, high = self.even_share, min(each.estimate for each in found)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if (members := self.filled(middle)) is None:
                low = middle
            else:
                found.append(self.priced(members))
                high = min(middle, found[-1].estimate)
        return min(found, key=lambda each: each.estimate)

    def over_ranks(self) -> Iterator[SharedAssignment]:
        """See [Note: trees over ranks]. Completions are cut too, unless others would have to read too many tokens. At
        last groups are cut only between their samples, which then share nothing.
        """
        order = sorted(range(len(self.families)), key=lambda at: (not self.over[at], -self.costs[at]))
        count, fewest, least = len(order), max(sum(self.over), 1), math.inf
        while count >= fewest and least > self.even_share * (1 + BALANCED):
            line, others = ([self.families[at] for at in places] for places in (order[:count], order[count:]))
            rest = replace(self, families=others).apart()
            ways = [(line, False), (line, True)]
            if self.groups:
                unshared = [[e._replace(start=0, parent=None, learned=0) for e in family] for family in line]
                ways.append((unshared, True))
            for each, whole in ways:
                if found := [*self._laid(each, rest, whole)]:
                    least = min(each.estimate for each in found)
                    yield from map(self._compared, found)
                    break
            # A group over the cap can be assigned in no other way: the fewest are tried too.
            count = max(count // 2, min(fewest, count - 1)) if self.groups else count // 2

    def _compared(self, found: SharedAssignment) -> SharedAssignment:
        """With what counts against others: packs that read must be better by the least gain; else no rank waits."""
        apart = apart_from_their_group(found.packs, self.groups)

        def whole(each: Entry) -> Entry:
            return Segment(each, 0, self.lengths[each]) if not isinstance(each, Segment) and each in apart else each

        packs = [[[*map(whole, pack)] for pack in of_rank] for of_rank in found.packs]
        if SplitPlan.of(packs, groups=self.groups) is not None:
            return SharedAssignment(packs, found.estimate / (1 - _LEAST_GAIN))
        return SharedAssignment(packs, max(math.fsum(map(self._price, packs)) for packs in found.packs))

    def _laid(self, line: list[list[Strip]], rest: SharedAssignment, whole: bool) -> Iterator[SharedAssignment]:
        """`line` over ranks: in waves before the packs of `rest`, and in one microbatch with them, if they fit."""
        limits = {"ranks": self.ranks, "token_cap": self.token_cap, "cost": self.cost, "least": LEAST_TOKENS}
        waves = lay_waves(line, self.lengths, **limits, whole=whole)
        if waves is not None and self._fit(waves):
            by_rank = zip(zip(*waves, strict=True), rest.packs, strict=True)
            packs = [[*filter(None, parts), *own] for parts, own in by_rank]
            yield SharedAssignment(packs, math.fsum(max(map(self._price, wave)) for wave in waves) + rest.estimate)
        if 0 < max(map(len, rest.packs)) <= 1 and (wave := self._riding(line, rest.packs, whole)):
            yield SharedAssignment([[part] if part else [] for part in wave], max(map(self._price, wave)))

    def _riding(self, line: list[list[Strip]], rest: list[list[list[Entry]]], whole: bool) -> list[list[Entry]] | None:
        """One microbatch for each rank: its pack of `rest`, and a part of `line` that makes up for it; None if these
        don't fit.
        """
        own = [[*chain.from_iterable(packs)] for packs in rest]
        shares = [max(self.even_share - price(each, self.strips, self.cost), 0.0) for each in own]
        if not any(shares):
            return None
        parts = cut_line([*chain.from_iterable(line)], shares, self.cost, whole=whole)
        wave = [[*part, *each] for part, each in zip(parts, own, strict=True)]
        return wave if self._fit([wave]) else None

    def _fit(self, waves: list[list[list[Entry]]]) -> bool:
        if max(count_tokens(part, self.lengths) for wave in waves for part in wave) > self.token_cap:
            return False
        plan = SplitPlan.of([*zip(*waves, strict=True)])
        return plan is None or (max(plan.tokens) <= self.limits.readable and most_cuts(plan)[0] <= self.limits.cuts)

    def together(self) -> Members:
        """Each prefix group on one rank, and in one pack as far as the cap allows."""
        parts: list[list[Strip]] = []
        for family in self.families:
            tokens = math.inf
            for each in family:
                own = each.stop - each.start
                if tokens + own > self.token_cap:
                    parts.append([])
                    tokens = each.start
                parts[-1].append(each)
                tokens += own
        whole = [[part[0]._replace(start=0), *part[1:]] for part in parts]
        costs = [*map(self._together, whole)]
        tokens = [sum(each.stop - each.start for each in part) for part in whole]
        members = []
        for own in balanced_partition(costs, self.ranks):
            packs = best_fit([tokens[at] for at in own], self.token_cap) if own else []
            members.append([[each.sample for at in places for each in parts[own[at]]] for places in packs])
        return members

    def alone(self) -> Members:
        """As LB-Mini."""
        strips, members = [*chain.from_iterable(self.families)], []
        for places in balanced_partition([each.price(self.cost) for each in strips], self.ranks):
            own = [strips[at] for at in places]
            tokens = [each.stop for each in own]
            packs = packed(tokens, self.cost.samples(tokens), self.token_cap) if own else []
            members.append([[own[at].sample for at in places] for places in packs])
        return members

    def filled(self, most: float) -> Members | None:
        """Ranks filled one after the other with at most `most` cost, costly groups first; None if some don't fit."""
        members: Members = [[]]
        load, tokens = 0.0, math.inf
        for family in sorted(range(len(self.families)), key=lambda at: -self.costs[at]):
            shares = False
            for each in self.families[family]:
                begin = each.start if shares else 0
                whole, cost, count = each.price(self.cost), each.price(self.cost, begin), each.stop - begin
                if tokens + count > self.token_cap:
                    cost, count = whole + self.cost.microbatch, math.inf
                if load + cost > most * (1 + 1e-9):
                    members.append([])
                    load, cost, count = 0.0, whole + self.cost.microbatch, math.inf
                    if len(members) > self.ranks or cost > most * (1 + 1e-9):
                        return None
                if count == math.inf:
                    members[-1].append([])
                    tokens, count = 0, each.stop
                members[-1][-1].append(each.sample)
                load, tokens, shares = load + cost, tokens + count, True
        return members + [[] for _ in range(self.ranks - len(members))]

    def priced(self, members: Members) -> SharedAssignment:
        packs_of_ranks, estimate = [], 0.0
        for packs in members:
            priced = [(self._price(entries), entries) for entries in map(self.relatives.entries, packs)]
            priced.sort(key=lambda it: -it[0])
            packs_of_ranks.append([entries for _, entries in priced])
            estimate = max(estimate, math.fsum(cost for cost, _ in priced))
        return SharedAssignment(packs_of_ranks, estimate)

    def _price(self, entries: Sequence[Entry]) -> float:
        """Of a microbatch."""
        return price(entries, self.strips, self.cost) + self.cost.microbatch * bool(entries)

    def _together(self, strips: Sequence[Strip]) -> float:
        """Their cost where each branch is in the same pack as its parent."""
        return math.fsum(each.price(self.cost, each.start) for each in strips)
