"""What the engine needs from symmetric memory, on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Protocol

import torch

from ..layout import Region


class Word(IntEnum):
    """The status words that each rank shows its peers. Only their own rank writes them."""

    PID = 0
    PUBLISHED = 1  # how many times this rank has published its shards
    STEPPING = 2  # PUBLISHED + 1 while this rank may be writing its shards, else PUBLISHED
    BROKEN = 3  # 1 once this rank has given up on its peers
    MINIBATCH = 4
    LEFT = 5  # 1 after this rank closed its heap
    MEETINGS = 6  # how many meetings of the engine this rank has reached
    GATHERS = 7  # how many exchanges between replicas this rank has reached
    FAILED = 8  # the number of the plan of split sequences that this rank can't complete
    WAITS = 9  # the flag of split sequences that this rank waits for (sequence/room.py), 0: none
    ROWS = 10  # the step of Muon whose rows this rank has written, and what of (optim/room.py)
    RESULTS = 11  # the step of Muon whose matrices this rank has orthogonalised


WORDS = len(Word)


class Signs(Protocol):
    """What ranks see of each other: a heap's own words, or those of several replicas (peers.py)."""

    def show(self, word: Word, value: int) -> None:
        """Sets one of this rank's words."""

    def seen(self, word: Word) -> list[int]:
        """That word of every rank."""

    def is_alive(self, rank: int) -> bool:
        """Whether that rank's process still exists."""


class SymmetricHeap(ABC):
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
    def show(self, word: Word, value: int) -> None:
        """Sets one of this rank's words."""

    @abstractmethod
    def seen(self, word: Word) -> list[int]:
        """That word of every rank."""

    @abstractmethod
    def is_alive(self, rank: int) -> bool:
        """Whether that rank's process still exists and has the heap open."""

    @abstractmethod
    def close(self) -> None: ...
