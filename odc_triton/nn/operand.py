"""A parameter on its owners, as operators see it, whoever the owners are.

Numbers by which custom operators name objects, which they can't take as arguments.

[Note: handles] A handle is an int64 tensor [1] on the CPU that holds such a number. `torch.compile` treats it as one
more input of the graph, so one graph serves all layers of a kind. An operator that writes into shared memory declares
the handle as mutated, though it never writes to it: so it is not removed as useless, nor moved or made twice, and if it
is given a copy, as under functionalization, the copy holds the same number. Given a shard itself, it would be run on a
copy of it, which would be written back over what peers had added meanwhile. An operator's backward keeps its handles
aside from what autograd saves, which would take the same weight's second use for a change of it.

The numbers are the process's only state here: an object is forgotten when nothing else holds it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from odc_kernels.peers import PeerShards
from odc_kernels.staged import StagedWeight

from .choice import TABLE, Entry

AddRows = Callable[[int, "int | torch.Tensor", torch.Tensor], None]
"""`add_rows(owner, at, rows)`: adds rows to those of an owner from `at` on, or to those whose numbers `at` holds."""


def add_rows(shard: torch.Tensor, at: int | torch.Tensor, rows: torch.Tensor) -> None:
    """Adds to an owner's shard as `AddRows` says; nobody else may add to it meanwhile."""
    if isinstance(at, torch.Tensor):
        shard.index_add_(0, at, rows.to(shard.dtype))
    else:
        shard[at : at + len(rows)].add_(rows)


class OnOwners(Protocol):
    """A parameter [N, ...] whose rows lie on `world` owners, split as `torch.chunk` splits.

    `leaf`: what autograd knows of it; `dtype`: what is computed with; `table`: how operators on it run, see choice.py.
    """

    leaf: torch.Tensor
    table: tuple[Entry, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    world: int

    @property
    def compute_peers(self) -> PeerShards:
        """The shards to read, as kernels see them; not for a scalar."""

    def parts(self, strategy: str) -> list[torch.Tensor]:
        """The rows to compute with, in their order: all in one tensor, or with "direct" maybe owner by owner.

        "gathered" takes the unit's whole tensor, which must be filled now, "staged" makes a copy of its own.
        """

    def read(self) -> torch.Tensor:
        """A copy of the whole tensor."""

    def pull(self) -> StagedWeight:
        """Begins to copy it from its owners; what is returned is for a kernel that waits for the copies."""

    def first_row(self, owner: int) -> int:
        """The number of `owner`'s first row; behind the last owner, that of all rows."""

    def owners_from_own(self) -> Iterator[int]:
        """The owners that hold rows, this rank first, then the next ones: so ranks are at different owners."""

    def wants_gradient(self) -> bool:
        """Whether the backward that runs now shall make its gradient, as it does not if asked for others' alone."""

    def open_sink(self) -> PeerShards | AddRows:
        """What an operator adds a gradient through that it makes piece by piece: shards for a kernel, or a function."""

    def add_gradient(self, gradient: torch.Tensor | None) -> None:
        """Adds a whole gradient."""


@runtime_checkable
class ReadsOnDemand(Protocol):
    """A module that computes with some of its parameters without their being whole."""

    def reads_on_demand(self, topology: str, table: tuple[Entry, ...] = TABLE) -> tuple[str, ...]:
        """The attributes that hold them, where shards lie as `topology` says and operators run as `table` does."""


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` gave this module the methods of a sharded one."""
    return getattr(type(module), "_odc_is_sharded", False)


_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, OnOwners] = weakref.WeakValueDictionary()


def handle_of(target: OnOwners) -> torch.Tensor:
    """A new handle of `target`."""
    number = next(_numbers)
    _objects[number] = target
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def resolve(handle: torch.Tensor) -> OnOwners:
    """What the handle names. Raises RuntimeError if it is gone."""
    target = _objects.get(int(handle))
    if target is None:
        raise RuntimeError("a layer's weight belongs to a sharded model that is gone; keep the model that was sharded")
    return target
