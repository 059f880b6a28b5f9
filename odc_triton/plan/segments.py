"""Samples in segments over ranks: split sequences, branches, and the plan of one minibatch, the same on all ranks.

A segment reads the keys and values of the tokens before it from the ranks that compute them, and adds gradients into
them (sequence/). They are earlier segments of its sample, or of a sample that begins with the same tokens, from which
it *branches* (`relatives.py`): a split sequence is a tree without branches. So the ranks of a tree compute at the same
time, layer by layer: a *wave*.

[Note: waves] Three rules exclude deadlocks:
1. A rank's segments of one wave are in one microbatch; a tree's segments are in one wave. So are those of a group,
   samples whose losses need each other: over ranks all of them are segments, also unsplit samples, and its trees count
   as one.
2. Every rank runs its waves in ascending order. Packs that read nothing of other ranks may come at any place between.
3. A layer's attention publishes all of the microbatch's own segments, then waits for others'. Its backward adds to all
   others', then waits for the additions to its own.
Take the first wave that is not done. Each of its ranks has done its earlier waves, and other packs never wait, so
each rank reaches it. Within it, waits follow the order publish(l) < attend(l) < publish(l + 1), then, with activation
checkpointing again, publish(l) < attend(l) < add(l) < collect(l) < publish(l - 1), where attend(l) needs only others'
publish(l), collect(l) only others' add(l), and, where n layers have buffers, publish(l) in a forward only others'
attend(l - n).
A recurrent layer counts as two: [Note: rows, states] in recurrent/exchange.py.
How deep the tree is does not matter: a branch of a branch reads rows of layer l, which wait for nobody's layer l.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any, NamedTuple

from .entries import Entry, Segment, number_of

PacksOfRanks = Sequence[Sequence[Sequence[Entry]]]
Groups = Mapping[int, int]  # of samples that have one


class Read(NamedTuple):
    """Tokens `low` up to, not including, `high`, which `holder` computes: a Segment, in a plan a PlannedSegment."""

    holder: Any
    low: int
    high: int


def reads_of(segments: Iterable[Segment]) -> dict[Segment, tuple[Read, ...]]:
    """For each segment the tokens before it: which of the segments computes them, in the order of tokens.

    Raises ValueError, naming the sample, for segments that leave a gap or overlap, and for a branch whose parent is
    not among them.
    """
    by_sample: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda segment: (segment.sample, segment.start)):
        by_sample.setdefault(segment.sample, []).append(segment)
    reads: dict[Segment, tuple[Read, ...]] = {}
    # A branch's parent begins before it.
    for sample, own in sorted(by_sample.items(), key=lambda it: it[1][0].start):
        first = own[0]
        end, before, reads[first] = first.start, None, ()
        if first.parent is None:
            end = 0
        else:
            before = next((each for each in by_sample.get(first.parent, ()) if each.start < end <= each.stop), None)
            if before is None:
                raise ValueError(
                    f"{first} branch from sample {first.parent}, and no segment here computes its token {end - 1}: "
                    f"give all segments of sample {first.parent}, as Segment({first.parent}, 0, …) if it is not split, "
                    f"or as parent the sample that computes that token"
                )
        for segment in own:
            if segment.start != end or (segment.parent is not None and segment is not first):
                fault = "leave out" if segment.start > end else "hold twice"
                low, high = sorted((segment.start, end))
                raise ValueError(f"the segments of sample {sample} {fault} its tokens {low}..{max(high - 1, low)}")
            if before is not None:
                reads[segment] = (*reads[before], Read(before, before.start, segment.start))
            end, before = segment.stop, segment
    return reads


def within(window: int | None, segment: Segment, reads: Iterable[Read]) -> list[Read]:
    """What a segment reads of `reads` where a query sees `window` tokens, itself included."""
    first = 0 if window is None else max(0, segment.start - window + 1)
    return [Read(each.holder, max(each.low, first), each.high) for each in reads if each.high > first]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """A segment, the rank and the wave that compute it, and the place of its keys and values.

    `read`: how many of its tokens, from the first, other ranks read. `offset`: the first row in the rank's buffers, in
    tokens.
    """

    segment: Segment
    rank: int
    wave: int
    read: int
    offset: int


class PlannedReads:
    """Planned segments, and what they read of each other: by segment, in the order of tokens."""

    def __init__(self, segments: Iterable[PlannedSegment], reads: Mapping[Segment, Iterable[Read]]) -> None:
        self._by_segment = {each.segment: each for each in segments}
        self._reads: dict[Segment, tuple[Read, ...]] = {}
        self._readers: dict[Segment, list[PlannedSegment]] = {segment: [] for segment in self._by_segment}
        for segment, own in reads.items():
            self._reads[segment] = tuple(Read(self._by_segment[holder], low, high) for holder, low, high in own)
            for read in self._reads[segment]:
                self._readers[read.holder.segment].append(self._by_segment[segment])

    def find(self, segment: Segment) -> PlannedSegment | None:
        """The plan of `segment`; None if it is not in it, as no other rank has a part in it."""
        return self._by_segment.get(segment)

    def reads(self, segment: Segment) -> tuple[Read, ...]:
        """What `segment` reads: of a `SplitPlan` all tokens before it, also those that its rank computes."""
        return self._reads[segment]

    def readers(self, segment: Segment) -> list[PlannedSegment]:
        """The segments that read `segment`."""
        return self._readers[segment]


class SplitPlan(PlannedReads):
    """The ranks that compute the segments of one minibatch; ranks compare it by `digest` at the minibatch's entry.

    It also has `waves`, their number, and `tokens`, by rank, how many tokens' keys and values others read.

    segments: by sample and token.
    ranks: of the job.
    replicas: consecutive ranks of equal number that share memory, as all segments of a tree must; often a host each.
    contents: a hash of the tokens that samples share, as `digest` covers them.
    """

    def __init__(
        self, segments: Iterable[PlannedSegment], *, ranks: int, replicas: int = 1, contents: str = ""
    ) -> None:
        self.segments, self.ranks, self.replicas, self.contents = tuple(segments), ranks, replicas, contents
        self.waves = 1 + max((each.wave for each in self.segments), default=-1)
        # By sample, where its last segment ends.
        self.lengths = {each.segment.sample: each.segment.stop for each in self.segments}
        self.tokens = [0] * ranks
        for each in self.segments:
            self.tokens[each.rank] += each.read
        self.digest = hashlib.sha256(f"{self.segments} {contents}".encode()).hexdigest()[:16]
        super().__init__(self.segments, reads_of(each.segment for each in self.segments))

    def of_rank(self, rank: int) -> list[PlannedSegment]:
        """The segments that `rank` computes."""
        return [each for each in self.segments if each.rank == rank]

    def of_replica(self, replica: int) -> SplitPlan | None:
        """The part of one replica, whose ranks are numbered from 0; None if nothing is split there."""
        if self.replicas == 1:
            return self
        shards = self.ranks // self.replicas
        own = [replace(each, rank=each.rank % shards) for each in self.segments if each.rank // shards == replica]
        return SplitPlan(own, ranks=shards, contents=self.contents) if own else None

    @classmethod
    def of(
        cls, packs_of_ranks: PacksOfRanks, *, replicas: int = 1, contents: str = "", groups: Groups | None = None
    ) -> SplitPlan | None:
        """The plan of all ranks' packs; None if no segment reads another pack's, and no group is in several.

        packs_of_ranks: by rank, its packs in order.
        replicas, contents: as of the class.
        groups: by sample, the number of its group.

        Raises ValueError, naming the sample, for segments that leave a gap, overlap, are alone or on several replicas,
        for a sample that is both split and whole, for a branch from one that is not in segments, for a whole one whose
        group is in several packs, and for packs whose ranks would wait for each other in a circle.
        """
        ranks = len(packs_of_ranks)
        if replicas < 1 or ranks % replicas:
            raise ValueError(f"{ranks} ranks can't be split into {replicas} equal replicas")
        places: dict[Segment, tuple[int, int]] = {}  # rank, pack
        whole: set[int] = set()
        for rank, packs in enumerate(packs_of_ranks):
            for number, pack in enumerate(packs):
                for entry in pack:
                    if not isinstance(entry, Segment):
                        whole.add(entry)
                    elif entry in places:
                        raise ValueError(f"{entry} are in two packs")
                    else:
                        places[entry] = rank, number
        for segment in places:
            if segment.sample in whole:
                raise ValueError(
                    f"sample {segment.sample} is in the packs both whole and in segments: give one of them"
                )
        groups = {sample: group for sample, group in (groups or {}).items() if group is not None}
        for sample in whole & apart_from_their_group(packs_of_ranks, groups):
            raise ValueError(f"sample {sample} is whole, its group in several packs: give Segment({sample}, 0, …)")
        reads = reads_of(places)
        trees = _trees(places, reads, groups)
        for tree in trees:
            if len(tree) == 1:
                raise ValueError(f"{tree[0]} are its only segment: give the sample whole, or its other segments")
            where = {places[segment][0] * replicas // ranks for segment in tree}
            if len(where) > 1:
                raise ValueError(
                    f"sample {tree[0].sample} has segments on ranks of replicas {sorted(where)}, which can't read each "
                    f"other's keys and values: keep a sample, and all that branch from it, on one replica"
                )
        apart = [tree for tree in trees if len({places[segment] for segment in tree}) > 1]
        if not apart:
            return None
        waves = _waves(places, apart)
        read = dict.fromkeys(chain.from_iterable(apart), 0)
        for segment in read:
            for holder, low, high in reads[segment]:
                if places[holder][0] != places[segment][0]:
                    read[holder] = max(read[holder], high - low)
        planned, offsets = [], [0] * ranks
        for segment in sorted(read, key=lambda segment: (segment.sample, segment.start)):
            rank, wave = places[segment][0], waves[places[segment]]
            planned.append(
                PlannedSegment(segment=segment, rank=rank, wave=wave, read=read[segment], offset=offsets[rank])
            )
            offsets[rank] += read[segment]
        return cls(planned, ranks=ranks, replicas=replicas, contents=contents)


class _Joined(dict):
    """Disjoint groups of keys: by key one on the way to its group's leader."""

    def leader(self, key: Any) -> Any:
        while self.setdefault(key, key) != key:
            self[key] = key = self[self[key]]
        return key

    def join(self, one: Any, other: Any) -> None:
        self[self.leader(one)] = self.leader(other)


def apart_from_their_group(packs_of_ranks: PacksOfRanks, groups: Groups) -> set[int]:
    """The samples of groups that are in several packs."""
    homes: dict[int, set[tuple[int, int]]] = {}
    for rank, packs in enumerate(packs_of_ranks if groups else ()):
        for number, pack in enumerate(packs):
            for sample in groups.keys() & map(number_of, pack):
                homes.setdefault(groups[sample], set()).add((rank, number))
    return {sample for sample, group in groups.items() if len(homes.get(group, ())) > 1}


def _trees(segments: Iterable[Segment], reads: Mapping[Segment, Sequence[Read]], groups: Groups) -> list[list[Segment]]:
    """The segments in sets that read one another, or are of one group."""
    joined, first = _Joined(), dict[int, Segment]()
    for segment in segments:
        if reads[segment]:
            joined.join(segment, reads[segment][-1].holder)
        if segment.sample in groups:
            joined.join(segment, first.setdefault(groups[segment.sample], segment))
    trees: dict[Segment, list[Segment]] = {}
    for segment in segments:
        trees.setdefault(joined.leader(segment), []).append(segment)
    return list(trees.values())


def _waves(places: Mapping[Segment, tuple[int, int]], trees: Sequence[Sequence[Segment]]) -> dict[tuple[int, int], int]:
    """The wave of every (rank, pack) with segments of `trees`. Packs that share a tree are one wave."""
    groups = _Joined()
    for tree in trees:
        for segment in tree:
            groups.join(places[segment], places[tree[0]])

    def samples(waves: Iterable[tuple[int, int]]) -> list[int]:
        return sorted({segment.sample for tree in trees for segment in tree if groups.leader(places[segment]) in waves})

    before: dict[tuple[int, int], set[tuple[int, int]]] = {groups.leader(place): set() for place in list(groups)}
    last: dict[int, tuple[int, int]] = {}  # by rank
    for rank, pack in sorted(groups):
        wave = groups.leader((rank, pack))
        if last.get(rank) == wave:
            raise ValueError(
                f"rank {rank} has segments of samples {samples([wave])}, which are computed together, in two packs: "
                f"put all of them into one pack"
            )
        if rank in last:
            before[wave].add(last[rank])
        last[rank] = wave
    try:
        numbers = {wave: number for number, wave in enumerate(TopologicalSorter(before).static_order())}
    except CycleError as error:
        raise ValueError(
            f"ranks compute samples {samples(error.args[1])} in different orders and would wait for each other: order "
            f"their packs alike on every rank"
        ) from None
    return {place: numbers[groups.leader(place)] for place in list(groups)}
