"""Sequences split over ranks: pieces, and the plan of one minibatch, the same on all ranks.

A later piece of a sequence reads the keys and values of the earlier pieces from the ranks that hold them, and adds
gradients into them (sequence/). So the ranks of a sequence compute at the same time, layer by layer: a *wave*.

[Note: waves] Three rules exclude deadlocks:
1. A rank's pieces of one wave are in one microbatch; a sequence's pieces are in one wave.
2. Every rank runs its waves in ascending order. Whole samples may come at any place between them.
3. A layer's attention publishes all of the microbatch's own pieces, then waits for others'. Its backward adds to all
   others', then waits for the additions to its own.
Take the first wave that is not done. Each of its ranks has done its earlier waves, and whole samples never wait, so
each rank reaches it. Within it, waits follow the order publish(l) < attend(l) < publish(l + 1), then
add(l) < collect(l) < add(l - 1), where attend(l) needs only others' publish(l) and collect(l) only others' add(l).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` up to, not including, `stop` of a sample. Raises ValueError if it is empty.

    `parent`: the sample that begins with the same `start` tokens and computes them, in the same pack, if this is a
    branch of it (relatives.py); None: other pieces of the sample itself have them.
    """

    sample: int
    start: int
    stop: int
    parent: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"{self!r} has no tokens: give 0 <= start < stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"tokens {self.start}..{self.stop - 1} of sample {self.sample}"


Entry = int | Piece  # of a pack: a whole sample, or a piece of one


class MinibatchPacks(list):
    """One rank's packs of a minibatch. `split`: the plan of all ranks' pieces, None if no rank has one.

    It survives a DataLoader's workers, pickling and pinning, also on a rank without packs.
    """

    split: SplitPlan | None = None

    @classmethod
    def of(cls, packs: Iterable[Any], split: SplitPlan | None) -> MinibatchPacks:
        made = cls(packs)
        made.split = split
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPiece:
    """A piece, the rank that computes it, and the place of its keys and values.

    `is_read`: a later piece follows, so others read it. `offset`: its first row in the rank's own buffers, in tokens;
    `joint_offset`: its first row in one buffer for all ranks of its replica, in which a sequence's rows are adjacent.
    Both are 0 if it is not read.
    """

    piece: Piece
    rank: int
    is_read: bool
    offset: int
    joint_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSequence:
    """All pieces of one sample, in order, and the wave that computes them."""

    sample: int
    wave: int
    pieces: tuple[PlannedPiece, ...]

    def before(self, piece: Piece) -> tuple[PlannedPiece, ...]:
        """The pieces that `piece` reads."""
        return tuple(each for each in self.pieces if each.piece.start < piece.start)

    def after(self, piece: Piece) -> tuple[PlannedPiece, ...]:
        """The pieces that read `piece`."""
        return tuple(each for each in self.pieces if each.piece.start > piece.start)


class SplitPlan:
    """The ranks that compute the pieces of one minibatch; ranks compare it by `digest` at the minibatch's entry.

    `sequences`: by sample. `waves`: their number. `tokens`: by rank, how many tokens' keys and values others read.
    `replicas`: consecutive ranks of equal number that share memory, as all pieces of a sample must; often a host each.
    """

    def __init__(self, sequences: Sequence[SplitSequence], *, ranks: int, replicas: int = 1) -> None:
        self.ranks, self.replicas = ranks, replicas
        self.sequences = {each.sample: each for each in sequences}
        self.waves = 1 + max((each.wave for each in sequences), default=-1)
        self.tokens = [0] * ranks
        for each in self.pieces():
            self.tokens[each.rank] += len(each.piece) * each.is_read
        self.digest = hashlib.sha256(repr([*self.sequences.values()]).encode()).hexdigest()[:16]

    def pieces(self) -> Iterator[PlannedPiece]:
        for sequence in self.sequences.values():
            yield from sequence.pieces

    def of_rank(self, rank: int) -> list[PlannedPiece]:
        """The pieces that `rank` computes."""
        return [each for each in self.pieces() if each.rank == rank]

    def wave_of(self, piece: Piece) -> int:
        return self.sequences[piece.sample].wave

    def of_replica(self, replica: int) -> SplitPlan | None:
        """The part of one replica, whose ranks are numbered from 0; None if nothing is split there."""
        if self.replicas == 1:
            return self
        shards = self.ranks // self.replicas
        own = [
            replace(each, pieces=tuple(replace(piece, rank=piece.rank % shards) for piece in each.pieces))
            for each in self.sequences.values()
            if each.pieces[0].rank // shards == replica
        ]
        return SplitPlan(own, ranks=shards) if own else None

    @classmethod
    def of(cls, packs_of_ranks: Sequence[Sequence[Sequence[Entry]]], *, replicas: int = 1) -> SplitPlan | None:
        """The plan of all ranks' packs, by rank; None if they hold no piece.

        Raises ValueError, naming the sample, for pieces that leave a gap, overlap, are alone or on several replicas,
        for a sample that is both split and whole, and for packs that can't be computed as waves: see [Note: waves].
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
        if not places:
            return None
        waves = _waves(places)
        by_sample: dict[int, list[Piece]] = {}
        for piece in sorted(places, key=lambda piece: (piece.sample, piece.start)):
            by_sample.setdefault(piece.sample, []).append(piece)
        sequences, offsets, joint = [], [0] * ranks, [0] * replicas
        for sample, pieces in by_sample.items():
            _check(pieces, sample in whole)
            where = {places[piece][0] * replicas // ranks for piece in pieces}
            if len(where) > 1:
                raise ValueError(
                    f"sample {sample} has pieces on ranks of replicas {sorted(where)}, which can't read each other's "
                    f"keys and values: keep all pieces of a sample on one replica"
                )
            (replica,) = where
            planned = []
            for piece in pieces:
                rank, is_read = places[piece][0], piece is not pieces[-1]
                offset, joint_offset = (offsets[rank], joint[replica]) if is_read else (0, 0)
                planned.append(
                    PlannedPiece(piece=piece, rank=rank, is_read=is_read, offset=offset, joint_offset=joint_offset)
                )
                offsets[rank] += len(piece) * is_read
                joint[replica] += len(piece) * is_read
            sequences.append(SplitSequence(sample=sample, wave=waves[places[pieces[0]]], pieces=tuple(planned)))
        return cls(sequences, ranks=ranks, replicas=replicas)


def _check(pieces: Sequence[Piece], is_whole_too: bool) -> None:
    sample = pieces[0].sample
    if is_whole_too:
        raise ValueError(f"sample {sample} is in the packs both whole and in pieces: give one of them")
    if len(pieces) == 1:
        raise ValueError(f"{pieces[0]} are its only piece: give the sample whole, or its other pieces")
    end = 0
    for piece in pieces:
        if piece.start != end:
            fault = "leave out" if piece.start > end else "hold twice"
            first, last = sorted((piece.start, end))
            raise ValueError(f"the pieces of sample {sample} {fault} its tokens {first}..{last - 1}")
        end = piece.stop


def _waves(places: dict[Piece, tuple[int, int]]) -> dict[tuple[int, int], int]:
    """The wave of every (rank, pack) with pieces. Packs that share a sequence are one wave."""
    leaders = {place: place for place in places.values()}

    def leader(place: tuple[int, int]) -> tuple[int, int]:
        while leaders[place] != place:
            leaders[place] = place = leaders[leaders[place]]
        return place

    first: dict[int, tuple[int, int]] = {}
    for piece, place in places.items():
        leaders[leader(place)] = leader(first.setdefault(piece.sample, place))
    before: dict[tuple[int, int], set[tuple[int, int]]] = {leader(place): set() for place in leaders}
    last: dict[int, tuple[int, int]] = {}  # by rank
    for rank, pack in sorted(leaders):
        wave = leader((rank, pack))
        if last.get(rank) == wave:
            samples = sorted({piece.sample for piece, place in places.items() if leader(place) == wave})
            raise ValueError(
                f"rank {rank} has pieces of samples {samples}, which are computed together, in two packs: put all of "
                f"them into one pack"
            )
        if rank in last:
            before[wave].add(last[rank])
        last[rank] = wave
    try:
        numbers = {wave: number for number, wave in enumerate(TopologicalSorter(before).static_order())}
    except CycleError as error:
        circle = error.args[1]
        samples = sorted({piece.sample for piece, place in places.items() if leader(place) in circle})
        raise ValueError(
            f"ranks compute samples {samples} in different orders and would wait for each other: order their packs "
            f"alike on every rank"
        ) from None
    return {place: numbers[leader(place)] for place in leaders}
