"""Samples in pieces over ranks: split sequences, branches, and the plan of one minibatch, the same on all ranks.

A piece reads the keys and values of the tokens before it from the ranks that compute them, and adds gradients into them
(sequence/). They are earlier pieces of its sample, or of a sample that begins with the same tokens, which it *branches
off* (relatives.py): a split sequence is a tree without branches. So the ranks of a tree compute at the same time, layer
by layer: a *wave*.

[Note: waves] Three rules exclude deadlocks:
1. A rank's pieces of one wave are in one microbatch; a tree's pieces are in one wave. So are those of a group, samples
   whose losses need each other: over ranks all of them are pieces, also whole samples, and its trees count as one.
2. Every rank runs its waves in ascending order. Packs that read nothing of other ranks may come at any place between.
3. A layer's attention publishes all of the microbatch's own pieces, then waits for others'. Its backward adds to all
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

from .entries import Entry, Piece, number_of

PacksOfRanks = Sequence[Sequence[Sequence[Entry]]]
Groups = Mapping[int, int]  # of samples that have one


class Read(NamedTuple):
    """Tokens `low` up to, not including, `high`, which `holder` computes: a Piece, in a plan a PlannedPiece."""

    holder: Any
    low: int
    high: int


def reads_of(pieces: Iterable[Piece]) -> dict[Piece, tuple[Read, ...]]:
    """For each piece the tokens before it: which of the pieces computes them, in the order of tokens.

    Raises ValueError, naming the sample, for pieces that leave a gap or overlap, and for a branch off a sample that is
    not among them.
    """
    by_sample: dict[int, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.sample, piece.start)):
        by_sample.setdefault(piece.sample, []).append(piece)
    reads: dict[Piece, tuple[Read, ...]] = {}
    # What a sample branches off begins before it.
    for sample, own in sorted(by_sample.items(), key=lambda it: it[1][0].start):
        first = own[0]
        end, before, reads[first] = first.start, None, ()
        if first.parent is None:
            end = 0
        else:
            before = next((each for each in by_sample.get(first.parent, ()) if each.start < end <= each.stop), None)
            if before is None:
                raise ValueError(
                    f"{first} branch off sample {first.parent}, and no piece here computes its token {end - 1}: give "
                    f"all pieces of sample {first.parent}, as Piece({first.parent}, 0, …) if it is whole, or as parent "
                    f"the sample that computes that token"
                )
        for piece in own:
            if piece.start != end or (piece.parent is not None and piece is not first):
                fault = "leave out" if piece.start > end else "hold twice"
                low, high = sorted((piece.start, end))
                raise ValueError(f"the pieces of sample {sample} {fault} its tokens {low}..{max(high - 1, low)}")
            if before is not None:
                reads[piece] = (*reads[before], Read(before, before.start, piece.start))
            end, before = piece.stop, piece
    return reads


def within(window: int | None, piece: Piece, reads: Iterable[Read]) -> list[Read]:
    """What a piece reads of `reads` where a query sees `window` tokens, itself included."""
    first = 0 if window is None else max(0, piece.start - window + 1)
    return [Read(each.holder, max(each.low, first), each.high) for each in reads if each.high > first]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPiece:
    """A piece, the rank and the wave that compute it, and the place of its keys and values.

    `read`: how many of its tokens, from the first, other ranks read. `offset`: the first row in the rank's buffers, in
    tokens.
    """

    piece: Piece
    rank: int
    wave: int
    read: int
    offset: int


class SplitPlan:
    """The ranks that compute the pieces of one minibatch; ranks compare it by `digest` at the minibatch's entry.

    `pieces`: by sample and token. `waves`: their number. `tokens`: by rank, how many tokens' keys and values others
    read. `replicas`: consecutive ranks of equal number that share memory, as all pieces of a tree must; often a host
    each. `contents`: a hash of the tokens that samples share, as `digest` covers them.
    """

    def __init__(self, pieces: Iterable[PlannedPiece], *, ranks: int, replicas: int = 1, contents: str = "") -> None:
        self.pieces, self.ranks, self.replicas, self.contents = tuple(pieces), ranks, replicas, contents
        self.waves = 1 + max((each.wave for each in self.pieces), default=-1)
        self.lengths = {each.piece.sample: each.piece.stop for each in self.pieces}  # by sample: of its last piece
        self.tokens = [0] * ranks
        for each in self.pieces:
            self.tokens[each.rank] += each.read
        self.digest = hashlib.sha256(f"{self.pieces} {contents}".encode()).hexdigest()[:16]
        self._by_piece = {each.piece: each for each in self.pieces}
        self._reads = {
            piece: tuple(Read(self._by_piece[read.holder], read.low, read.high) for read in reads)
            for piece, reads in reads_of(self._by_piece).items()
        }
        self._readers: dict[Piece, list[PlannedPiece]] = {piece: [] for piece in self._by_piece}
        for piece, reads in self._reads.items():
            for read in reads:
                self._readers[read.holder.piece].append(self._by_piece[piece])

    def of_rank(self, rank: int) -> list[PlannedPiece]:
        """The pieces that `rank` computes."""
        return [each for each in self.pieces if each.rank == rank]

    def find(self, piece: Piece) -> PlannedPiece | None:
        """None if it is not in the plan, as no other rank has a part in it."""
        return self._by_piece.get(piece)

    def reads(self, piece: Piece) -> tuple[Read, ...]:
        """All tokens before `piece`, in order, also those that its own rank computes."""
        return self._reads[piece]

    def readers(self, piece: Piece) -> list[PlannedPiece]:
        """The pieces that read `piece`."""
        return self._readers[piece]

    def of_replica(self, replica: int) -> SplitPlan | None:
        """The part of one replica, whose ranks are numbered from 0; None if nothing is split there."""
        if self.replicas == 1:
            return self
        shards = self.ranks // self.replicas
        own = [replace(each, rank=each.rank % shards) for each in self.pieces if each.rank // shards == replica]
        return SplitPlan(own, ranks=shards, contents=self.contents) if own else None

    @classmethod
    def of(
        cls, packs_of_ranks: PacksOfRanks, *, replicas: int = 1, contents: str = "", groups: Groups | None = None
    ) -> SplitPlan | None:
        """The plan of all ranks' packs, by rank; None if no piece reads another pack's, and no group is in several.

        Raises ValueError, naming the sample, for pieces that leave a gap, overlap, are alone or on several replicas,
        for a sample that is both split and whole, for a branch off one that is not in pieces, for a whole one whose
        group is in several packs, and for packs that can't be computed as waves: see [Note: waves].
        """
        ranks = len(packs_of_ranks)
        if replicas < 1 or ranks % replicas:
            raise ValueError(f"{ranks} ranks can't be split into {replicas} equal replicas")
        places: dict[Piece, tuple[int, int]] = {}  # rank, pack
        whole: set[int] = set()
        for rank, packs in enumerate(packs_of_ranks):
            for number, pack in enumerate(packs):
                for entry in pack:
                    if not isinstance(entry, Piece):
                        whole.add(entry)
                    elif entry in places:
                        raise ValueError(f"{entry} are in two packs")
                    else:
                        places[entry] = rank, number
        for piece in places:
            if piece.sample in whole:
                raise ValueError(f"sample {piece.sample} is in the packs both whole and in pieces: give one of them")
        groups = {sample: group for sample, group in (groups or {}).items() if group is not None}
        for sample in whole & apart_from_their_group(packs_of_ranks, groups):
            raise ValueError(f"sample {sample} is whole, its group in several packs: give Piece({sample}, 0, …)")
        reads = reads_of(places)
        trees = _trees(places, reads, groups)
        for tree in trees:
            if len(tree) == 1:
                raise ValueError(f"{tree[0]} are its only piece: give the sample whole, or its other pieces")
            where = {places[piece][0] * replicas // ranks for piece in tree}
            if len(where) > 1:
                raise ValueError(
                    f"sample {tree[0].sample} has pieces on ranks of replicas {sorted(where)}, which can't read each "
                    f"other's keys and values: keep a sample, and all that branch off it, on one replica"
                )
        apart = [tree for tree in trees if len({places[piece] for piece in tree}) > 1]
        if not apart:
            return None
        waves = _waves(places, apart)
        read = dict.fromkeys(chain.from_iterable(apart), 0)
        for piece in read:
            for holder, low, high in reads[piece]:
                if places[holder][0] != places[piece][0]:
                    read[holder] = max(read[holder], high - low)
        planned, offsets = [], [0] * ranks
        for piece in sorted(read, key=lambda piece: (piece.sample, piece.start)):
            rank, wave = places[piece][0], waves[places[piece]]
            planned.append(PlannedPiece(piece=piece, rank=rank, wave=wave, read=read[piece], offset=offsets[rank]))
            offsets[rank] += read[piece]
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


def _trees(pieces: Iterable[Piece], reads: Mapping[Piece, Sequence[Read]], groups: Groups) -> list[list[Piece]]:
    """The pieces in sets that read one another, or are of one group."""
    joined, first = _Joined(), dict[int, Piece]()
    for piece in pieces:
        if reads[piece]:
            joined.join(piece, reads[piece][-1].holder)
        if piece.sample in groups:
            joined.join(piece, first.setdefault(groups[piece.sample], piece))
    trees: dict[Piece, list[Piece]] = {}
    for piece in pieces:
        trees.setdefault(joined.leader(piece), []).append(piece)
    return list(trees.values())


def _waves(places: Mapping[Piece, tuple[int, int]], trees: Sequence[Sequence[Piece]]) -> dict[tuple[int, int], int]:
    """The wave of every (rank, pack) with pieces of `trees`. Packs that share a tree are one wave."""
    groups = _Joined()
    for tree in trees:
        for piece in tree:
            groups.join(places[piece], places[tree[0]])

    def samples(waves: Iterable[tuple[int, int]]) -> list[int]:
        return sorted({piece.sample for tree in trees for piece in tree if groups.leader(places[piece]) in waves})

    before: dict[tuple[int, int], set[tuple[int, int]]] = {groups.leader(place): set() for place in list(groups)}
    last: dict[int, tuple[int, int]] = {}  # by rank
    for rank, pack in sorted(groups):
        wave = groups.leader((rank, pack))
        if last.get(rank) == wave:
            raise ValueError(
                f"rank {rank} has pieces of samples {samples([wave])}, which are computed together, in two packs: put "
                f"all of them into one pack"
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
