"""Other owners' rows of one parameter on this rank, where shards are apart: of experts, whose rows are a matrix each.

slot    one of two places that rows pass through: the next ones are copied into one while the other is read
kept    rows that stay for a minibatch, in which they don't change, and sums of their gradients, which are added to
        their owners at its end: the `expert_cache_bytes` of fully_shard
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch

from odc_kernels.peers import ALIGNMENT_BYTES, PeerShards

from ..nn.operand import AddRows
from .minibatch import Participant
from .shard import HeapShard
from .transport import Copies, Streams, Target

# At 380 GB/s a copy takes 22 µs, about as long as the host needs to enqueue it and the product that reads it.
_SLOT_BYTES = 8 * 2**20

Group = tuple[int, int, int]  # owner, first row, number of rows


class Slots:
    """Two places for rows of each shape, dtype, stream and thread: a backward may have another than its forward. Copies
    into a place follow each other, and what was computed on its stream.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._places: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, like: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
        """Those for up to `count` rows like these, by turns."""
        shape = count, *like.shape[1:]
        device = self.streams.device
        key = shape, like.dtype, None if device is None else device.current(), threading.get_ident()
        if key not in self._places:
            with torch.inference_mode(False):  # they are written outside of it, too
                self._places[key] = like.new_empty(shape), like.new_empty(shape)
        return itertools.cycle(self._places[key])


class RowsOfOwners:
    """A parameter's rows as this rank reads them. `kept`: of how many it keeps copies; `summed`: of how many of these
    also sums of gradients.
    """

    def __init__(self, shard: HeapShard, slots: Slots, kept: int, summed: int) -> None:
        self._shard, self.slots = shard, slots
        heap = shard.heap
        turn = [(heap.rank + step) % heap.world for step in range(heap.world)]
        self._turn = [owner for owner in turn if shard.rows[owner][0] < shard.rows[owner][1]]
        others = (row for owner in self._turn if owner != heap.rank for row in range(*shard.rows[owner]))
        self._places = {row: place for place, row in enumerate(itertools.islice(others, kept))}
        like = shard.compute_shards[heap.rank]
        self._copies = like.new_empty(kept, *like.shape[1:])
        self._sums = like.new_empty(0) if summed == 0 else shard.target.shards[0].new_zeros(summed, *like.shape[1:])
        self._is_open = False
        self._come: dict[Group, Copies] = {}
        self._summed: set[int] = set()  # places
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        return bool(self._places)

    def begin(self, *, is_open: bool) -> None:
        """A minibatch, or the time after it, in which rows change. Forgets them, and sums that are not added yet."""
        self._is_open = is_open
        self._come.clear()
        if self._summed:
            self._sums.zero_()
            self._summed.clear()

    def copied(self, rows: Sequence[int] | None) -> Iterator[tuple[int, torch.Tensor]]:
        """As in `ShardedOperand`."""
        rank, most = self._shard.heap.rank, self._rows_of_a_slot if rows is None else 1
        groups = self._all if rows is None else self._groups(rows, 1)
        others, places = (group for group in groups if group[0] != rank), self.slots.of(self._copies, most)
        ahead: deque[tuple[int, torch.Tensor, Copies]] = deque()

        def begin() -> None:
            if (group := next(others, None)) is not None:
                ahead.append((group[1], *self._begin(group, places)))

        begin()
        begin()
        for owner, first, count in groups:
            if owner == rank:
                yield first, self._rows(owner, first, count)
        while ahead:
            first, values, copies = ahead.popleft()
            self.slots.streams.wait(copies)
            yield first, values
            begin()

    def _rows(self, owner: int, first: int, count: int) -> torch.Tensor:
        at = first - self._shard.rows[owner][0]
        return self._shard.compute_shards[owner][at : at + count]

    @cached_property
    def _rows_of_a_slot(self) -> int:
        return rows_in_slot(math.prod(self._copies.shape[1:]) * self._copies.itemsize)

    @cached_property
    def _all(self) -> list[Group]:
        """Own ones together, as they need no slot."""
        return self._groups(range(self._shard.spec.shape[0]), self._rows_of_a_slot, own=self._shard.spec.shape[0])

    @cached_property
    def _kept(self) -> list[Group]:
        return self._groups(self._places.keys(), len(self._places))

    def _groups(self, rows: Collection[int], most: int, own: int = 1) -> list[Group]:
        """Of at most that many rows of one owner, all kept or none; own ones first."""
        wanted, found = set(rows), [(-1, -1, 0)]
        for owner in self._turn:
            for row in filter(wanted.__contains__, range(*self._shard.rows[owner])):
                before, first, count = found[-1]
                alike = before == owner and (first in self._places) == (row in self._places)
                if alike and first + count == row and count < (own if owner == self._shard.heap.rank else most):
                    found[-1] = owner, first, count + 1
                else:
                    found.append((owner, row, 1))
        return found[1:]

    def _begin(self, group: Group, places: Iterator[torch.Tensor]) -> tuple[torch.Tensor, Copies]:
        """Begins to copy these rows, unless they are kept here already."""
        _, first, count = group
        if (place := self._places.get(first)) is None:
            values = next(places)[:count]
            return values, self._copy(values, self._rows(*group))
        values = self._copies[place : place + count]
        if not self._is_open or group not in self._come:
            self._come[group] = self._copy(values, self._rows(*group))
        return values, self._come[group]

    def _copy(self, values: torch.Tensor, rows: torch.Tensor) -> Copies:
        def work() -> None:
            values.copy_(rows, non_blocking=True)

        return self.slots.streams.copy(values.untyped_storage(), work)

    # ---- for kernels, which see a table with an address for each row

    def row_peers(self) -> PeerShards:
        """As in `ShardedOperand`."""
        if not self.keeps or not self._is_open:
            return self._shard.compute_peers
        for group in self._kept:
            _, copies = self._begin(group, iter(()))
            self.slots.streams.wait(copies)
        return self._read_peers

    @cached_property
    def _read_peers(self) -> PeerShards:
        return self._table(self._shard.compute_shards, self._copies)

    @cached_property
    def _sum_peers(self) -> PeerShards:
        return self._table(self._shard.target.shards, self._sums)

    def _table(self, shards: Sequence[torch.Tensor], kept: torch.Tensor) -> PeerShards:
        heap, rows = self._shard.heap, [row for shard in shards for row in shard.split(1)]
        near = {row for owner in {heap.rank, *(heap.near or ())} for row in range(*self._shard.rows[owner])}
        for row, values in zip(self._places, kept.split(1), strict=False):
            rows[row] = values
            near.add(row)
        first = min(self._shard.rows[heap.rank][0], len(rows) - 1)
        return PeerShards.of(rows, shape=self._shard.spec.shape, rank=first, aligned=heap.apart, near=near)

    # ---- gradients

    def sink(self, sink: PeerShards | AddRows, target: Target) -> PeerShards | AddRows:
        """Where an operator adds what would go into `sink`: of kept rows, to the sums on this rank."""
        if not len(self._sums):
            return sink
        if isinstance(sink, PeerShards):
            self._summed.update(range(len(self._sums)))
            return target.adding(self._sum_peers)

        def add(owner: int, at: int | torch.Tensor, rows: torch.Tensor) -> None:
            row = None if isinstance(at, torch.Tensor) or len(rows) != 1 else self._shard.rows[owner][0] + at
            if row is None or (place := self._places.get(row, len(self._sums))) >= len(self._sums):
                sink(owner, at, rows)
                return
            with self._lock:
                self._summed.add(place)
                target.add_into(self._sums, place, rows.detach())

        return add

    def flush(self, add: Callable[[int, int, torch.Tensor], None]) -> None:
        """Adds the sums to their owners by `add(owner, at, sums)`."""
        rows = [row for row, place in self._places.items() if place in self._summed]
        for owner, first, count in self._groups(rows, len(rows)):
            place = self._places[first]
            add(owner, first - self._shard.rows[owner][0], self._sums[place : place + count])


class HoldsRows(Protocol):
    """A parameter, which may have rows of its owners here."""

    rows: RowsOfOwners | None

    def add_sums(self, owner: int, at: int, sums: torch.Tensor) -> None: ...


class KeptRows(Participant):
    """Of all parameters: at the end of a minibatch their sums go to their owners."""

    name = "kept rows"

    def __init__(self, parameters: Sequence[HoldsRows], drain: Callable[[str], None]) -> None:
        """`parameters`: of the engine; some may be added later. `drain`: waits for this rank's device."""
        self._parameters, self._drain = parameters, drain

    def _keeping(self) -> list[tuple[HoldsRows, RowsOfOwners]]:
        return [(each, each.rows) for each in self._parameters if each.rows is not None and each.rows.keeps]

    def opened(self) -> None:
        for _, rows in self._keeping():
            rows.begin(is_open=True)

    def leave(self) -> None:
        try:
            self._drain("sums of kept experts")  # microbatches may have been on other streams
            for parameter, rows in self._keeping():
                rows.flush(parameter.add_sums)
        finally:
            for _, rows in self._keeping():
                rows.begin(is_open=False)


def rows_in_slot(row_bytes: int) -> int:
    """Where a kernel reads them; else it is one row."""
    return max(1, _SLOT_BYTES // max(row_bytes, 1))


def rows_to_keep(
    others: Sequence[int], row_bytes: Sequence[tuple[int, int]], budget_bytes: int
) -> list[tuple[int, int]]:
    """Of parameters with so many rows on other ranks: the same share of each within the budget, first copies, which are
    read twice in each microbatch, then sums, which are added to once. `row_bytes`: of a row's copy and its sum. None if
    kernels, which see them by their addresses, could not read some.
    """
    copies, sums = (sum(n * each[kind] for n, each in zip(others, row_bytes, strict=True)) for kind in (0, 1))
    if any(each[0] % ALIGNMENT_BYTES for each in row_bytes):
        budget_bytes = 0
    for_sums, found = max(budget_bytes - copies, 0), []
    for count, (_, sum_bytes) in zip(others, row_bytes, strict=True):
        summed = min(count, for_sums * count // max(sums, 1)) if sum_bytes else 0
        found.append((min(count, budget_bytes * count // max(copies, 1)), summed))
    return found


def rows_of_owners(
    shards: Sequence[HeapShard], keeping: Collection[HeapShard], streams: Streams, budget_bytes: int
) -> dict[HeapShard, RowsOfOwners]:
    """Of these shards. Those of `keeping` keep as many rows as `rows_to_keep` says."""

    def sizes(shard: HeapShard) -> tuple[int, int]:
        kinds = shard.compute_shards[0], shard.gradient_shard
        values, sums = (0 if of is None else math.prod(of.shape[1:]) * of.itemsize for of in kinds)
        return values, sums

    others = [shard.spec.shape[0] - len(shard.compute_shards[shard.heap.rank]) for shard in keeping]
    kept = dict(zip(keeping, rows_to_keep(others, [sizes(shard) for shard in keeping], budget_bytes), strict=True))
    slots = Slots(streams)
    return {shard: RowsOfOwners(shard, slots, *kept.get(shard, (0, 0))) for shard in shards}
