"""Buffers for the rows of matrices that Muon orthogonalises whole.

A second heap of the model's ranks, with a region [N, M] in bf16 for each matrix, split like the parameter. Each matrix
has one rank that orthogonalises it. In a step a row is written twice:

owner       writes its rows of the update, and shows that (`_rows_written`)
its rank    waits for all owners, reads the rows, orthogonalises, writes the result's rows there, and
            shows it (`_results_written`)
owner       waits for all ranks, and takes its rows of the result

Nobody else touches a matrix's rows in between, so one region serves both ways, and the next step's rows may be written
at once. A status has one writer and is never reset: it holds the number of the step.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence

import torch

from ..base.errors import RanksDiffer
from ..comm.layout import Region, first_difference, place_regions
from ..comm.memory.heap import Status
from ..engine.parameter import ShardedParameter
from ..engine.protocol import Protocol
from ..plan.partition import balanced_partition

_STEP_BITS = 32  # below them a status has a digest of what the step is of


def newton_schulz_cost(shape: tuple[int, ...]) -> float:
    """The cost of one iteration on a matrix, in multiplications: X X^T, its square, and that times X."""
    low, high = sorted(map(float, shape))
    return low * low * (2 * high + low)


def buffer_regions(shapes: Sequence[tuple[int, ...]], *, world: int, apart: bool) -> tuple[list[Region], int]:
    """The regions of matrices of these shapes, and the bytes of the heap (`apart`: of one rank)."""
    return place_regions([(shape, "bfloat16", torch.bfloat16.itemsize) for shape in shapes], world=world, apart=apart)


class MuonBuffers:
    """Collective: all ranks of `engine` open it for the same matrices.

    `rows`: by matrix, this rank's rows, bf16 [n, M]: those of the parameter's local shard. `mine`: the matrices that
    this rank orthogonalises, assigned by cost over the ranks that share memory. Several replicas do the same work each.

    Raises RanksDiffer with the first difference, and what a barrier raises.
    """

    def __init__(self, engine: Protocol, matrices: Sequence[ShardedParameter]) -> None:
        self._engine, self.matrices = engine, list(matrices)
        lines = [f"{matrix.name} {list(matrix.shape)}" for matrix in matrices]
        everyones = engine.exchange("open buffers for Muon", {"token": uuid.uuid4().hex, "matrices": lines})
        for rank, theirs in enumerate(everyones):
            if theirs["matrices"] != lines:
                difference = first_difference(lines, theirs["matrices"])
                raise RanksDiffer(f"rank {engine.rank}'s and rank {rank}'s Muon hold other parameters: {difference}")
        heap, world = engine.heap, engine.heap.world
        regions, size_bytes = buffer_regions([matrix.shape for matrix in matrices], world=world, apart=heap.apart)
        self._heap = heap.another(
            size_bytes=size_bytes,
            locks=0,
            token=f"{everyones[0]['token']}-muon-{engine.grid.replica}",
            timeout_s=engine.barrier.timeout_s,
        )
        # The last step, with a digest of what it steps; the last step.
        self._rows_written, self._results_written = Status(self._heap), Status(self._heap)
        self._shards = [[self._heap.shard(region, owner) for owner in range(world)] for region in regions]
        parts = zip(matrices, self._shards, strict=True)
        self._parts = [matrix.shard.parts_of(shards[heap.rank]) for matrix, shards in parts]
        self.rows = [parts[engine.grid.replica] for parts in self._parts]
        costs = [newton_schulz_cost(matrix.shape) for matrix in matrices]
        self.mine = balanced_partition(costs, world)[heap.rank] if costs else []
        self._step = 0

    def orthogonalise(
        self, numbers: Collection[int], by: Callable[[int, torch.Tensor], torch.Tensor], *, digest: int
    ) -> None:
        """Replaces this rank's `rows` of the matrices `numbers` by those of `by(number, matrix [N, M])`. Collective.

        `by` may overwrite the matrix. `digest`: of what must be the same on all ranks, 32 bits.

        Raises RanksDiffer if it is not; RankLost and DeadlineExceeded, with the rank, if one does not do its part.
        """
        engine, of_step = self._engine, f"of Muon's step {self._step}"
        self._step += 1
        engine.drain(f"the rows {of_step}")
        if engine.replicas.count > 1:
            engine.replicas.gather([self._parts[number] for number in numbers])
            engine.drain(f"other replicas' rows {of_step}")
        self._show(self._rows_written, digest)
        seen = self._wait(self._rows_written, f"the rows {of_step}")
        if differing := [engine.grid.first + rank for rank, value in enumerate(seen) if value != seen[self._heap.rank]]:
            raise RanksDiffer(
                f"Muon on ranks {differing} steps other gradients than on rank {engine.rank}, or with other "
                f"hyperparameters: a p.grad must be None on all ranks or on none, and groups must be alike"
            )
        for number in self.mine:
            if number in numbers:
                result = by(number, self._read(number))
                rows = result.split([len(shard) for shard in self._shards[number]])
                for owner in self._from_own():
                    self._shards[number][owner].copy_(rows[owner])
        engine.drain(f"the matrices {of_step}")
        self._show(self._results_written)
        self._wait(self._results_written, f"the matrices {of_step}")

    def _from_own(self) -> list[int]:
        """The owners, from this rank on, so that ranks visit different ones."""
        return [(self._heap.rank + step) % self._heap.world for step in range(self._heap.world)]

    def _read(self, number: int) -> torch.Tensor:
        """A copy of the whole matrix."""
        shards = self._shards[number]
        whole = shards[0].new_empty(self.matrices[number].shape)
        rows = whole.split([len(shard) for shard in shards])
        for owner in self._from_own():
            rows[owner].copy_(shards[owner], non_blocking=True)
        return whole

    def _show(self, status: Status, digest: int = 0) -> None:
        status.show(self._step << _STEP_BITS | digest)

    def _wait(self, status: Status, purpose: str) -> list[int]:
        """Until all ranks that share memory show this step; returns what they show."""
        engine = self._engine

        def missing() -> list[int]:
            seen = enumerate(status.seen(), engine.grid.first)
            return [rank for rank, value in seen if value >> _STEP_BITS < self._step]

        with engine.events.span("wait", label=purpose, microbatch=-1):
            engine.barrier.wait_for(purpose, missing)
        return status.seen()
