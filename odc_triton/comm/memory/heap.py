"""The interface of symmetric memory, on any device, and of the status that ranks show each other."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..layout import Region

STATUS_SLOTS = 16  # of 8 bytes, per rank
PID, LEFT = range(2)  # the heap's own slots; LEFT is 1 after the rank closed its heap


class StatusBoard(ABC):
    """Integers that each rank shows its peers, in slots that only their own rank writes; 0 at first."""

    _used = LEFT + 1

    def new_slot(self) -> int:
        """A slot that nothing else uses. All ranks take theirs in the same order."""
        if self._used == STATUS_SLOTS:
            raise RuntimeError(f"all {STATUS_SLOTS} status slots of the heap are in use")
        self._used += 1
        return self._used - 1

    @abstractmethod
    def show(self, slot: int, value: int) -> None:
        """Sets this rank's integer."""

    @abstractmethod
    def seen(self, slot: int) -> list[int]:
        """That integer of every rank."""

    @abstractmethod
    def is_alive(self, rank: int) -> bool:
        """True while that rank's process exists and has the heap open."""


class Status:
    """One integer per rank on a board."""

    def __init__(self, board: StatusBoard) -> None:
        self._board, self.slot = board, board.new_slot()

    def show(self, value: int) -> None:
        self._board.show(self.slot, value)

    def seen(self) -> list[int]:
        """By rank."""
        return self._board.seen(self.slot)


class SymmetricHeap(StatusBoard):
    """Declared regions, allocated once, mapped on all ranks, freed when the last rank releases them.

    `shard(region, owner)` is one owner's rows. Two calls give tensors over the same memory with *separate* autograd
    version counters: adding to a gradient must not look like a change of a saved weight.
    """

    rank: int
    world: int
    first: int = 0
    """The number of its rank 0 in messages: not 0 if several replicas have a heap each."""
    near: frozenset[int] | None = None
    """The ranks whose shards are on this rank's own device; None: this rank alone."""
    device: torch.device
    apart: bool
    """Whether each rank's shards are in its own memory: whole tensors must be gathered. Else they are views."""

    @abstractmethod
    def another(self, *, size_bytes: int, slots: int, token: str, timeout_s: float) -> SymmetricHeap:
        """A second heap of the same ranks and kind. Collective; `token` and errors as the first one's."""

    @abstractmethod
    def shard(self, region: Region, owner: int) -> torch.Tensor: ...

    @abstractmethod
    def close(self) -> None: ...
