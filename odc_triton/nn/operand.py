"""Operators' interface to a sharded parameter, and its handles for custom operators, which take only tensors.

[Note: handles] A handle is an int64 tensor [1] on the CPU with a number that identifies an object. `torch.compile`
treats it as one more input of the graph, so one graph serves all layers of a kind. An operator that writes into shared
memory declares the handle as mutated, though it never writes to it: so it is neither removed as dead, nor moved, nor
run twice. A copy of the handle, as under functionalization, holds the same number; a copy of the shard would overwrite
what peers had added meanwhile. An operator's backward keeps its handles outside of autograd's saved tensors: autograd
would take a second use of the weight for a change of it.

The numbers are the only process-wide state here: an object is dropped when nothing else refers to it.
"""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from odc_kernels.peers import PeerShards
from odc_kernels.staged import StagedWeight

if TYPE_CHECKING:
    from ..machine.topology import Place
    from .choice import Entry
    from .tuned import Tuned

Table: TypeAlias = "tuple[Entry, ...]"
"""How operators on a parameter run: see choice.py. Nothing is the shipped table."""

AddRows = Callable[[int, "int | torch.Tensor", torch.Tensor], None]
"""`add_rows(owner, at, rows)`: adds rows to an owner's rows, from `at` on or, if `at` is a tensor, at those indices."""


def add_rows(shard: torch.Tensor, at: int | torch.Tensor, rows: torch.Tensor) -> None:
    """Adds to an owner's shard, as `AddRows` does. No other process may add to it at the same time."""
    if isinstance(at, torch.Tensor):
        shard.index_add_(0, at, rows.to(shard.dtype))
    else:
        (shard if not at and rows.shape == shard.shape else shard[at : at + len(rows)]).add_(rows)


class ShardedOperand(Protocol):
    """A parameter [N, ...] whose rows are on `world` owners, chunked as by `torch.chunk`.

    `leaf`: autograd's tensor; `dtype`: the compute dtype; `table`: how operators on it run.
    """

    shape: tuple[int, ...]
    world: int

    @property
    def leaf(self) -> torch.Tensor: ...

    @property
    def table(self) -> Table: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def compute_peers(self) -> PeerShards:
        """The shards to read, as kernels see them; not for a scalar."""

    @abstractmethod
    def parts(self, source: str) -> list[torch.Tensor]:
        """The rows to compute with, in order: in one tensor, or possibly one per owner for "direct".

        "gathered" is the unit's whole tensor, which must be filled already; "staged" makes a separate copy.
        """

    @abstractmethod
    def read(self) -> torch.Tensor:
        """A copy of the whole tensor."""

    @abstractmethod
    def pull(self) -> StagedWeight:
        """Starts copying it from its owners; a kernel waits for the copies by the result."""

    @abstractmethod
    def row_peers(self) -> PeerShards:
        """As `compute_peers`; rows that this rank keeps are read here."""

    @abstractmethod
    def copied(self, rows: Sequence[int] | None) -> Iterator[tuple[int, torch.Tensor]]:
        """(row, rows from it on) of these rows one by one, or of all several at a time, own ones first. Others' are
        copied here meanwhile; they are valid until the next are asked for.
        """

    @abstractmethod
    def first_row(self, owner: int) -> int:
        """The index of `owner`'s first row; for `world`, the number of all rows."""

    @abstractmethod
    def owners_from_own(self) -> Iterator[int]:
        """The owners that hold rows, starting at this rank, so that ranks visit different owners at a time."""

    @abstractmethod
    def wants_gradient(self) -> bool:
        """False if autograd.grad() asked only for other tensors' gradients in the backward that runs now."""

    @abstractmethod
    def open_sink(self) -> PeerShards | AddRows:
        """The target of a gradient that an operator computes in chunks: shards for a kernel, or a function."""

    @abstractmethod
    def add_gradient(self, gradient: torch.Tensor | None) -> None:
        """Adds a whole gradient."""


def in_turn(operand: ShardedOperand, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(owner, row) of ascending rows: this rank's own first, then the next rank's."""
    for owner in operand.owners_from_own():
        first, end = (bisect_left(rows, operand.first_row(place)) for place in (owner, owner + 1))
        yield from ((owner, row) for row in rows[first:end])


def rows_in_turn(operand: ShardedOperand, rows: Sequence[int], source: str) -> Iterator[tuple[int, torch.Tensor]]:
    """(row, its values) of ascending rows, in the order of `in_turn`. `source`: of `parts`; "staged": by `copied`."""
    if source == "staged":
        yield from ((row, values[0]) for row, values in operand.copied(rows))
        return
    parts = operand.parts(source)
    for owner, row in in_turn(operand, rows):
        yield row, parts[0][row] if len(parts) == 1 else parts[owner][row - operand.first_row(owner)]


@runtime_checkable
class ReadsOnDemand(Protocol):
    """A module that computes with some of its parameters without gathering them."""

    @abstractmethod
    def reads_on_demand(self, device_type: str, table: Table = ()) -> tuple[str, ...]:
        """The attributes that hold them, on a "cpu" or "cuda" device, if operators run as in `table`."""


@runtime_checkable
class KeepsRows(Protocol):
    """A module of whose parameters a rank may keep others' rows for a minibatch."""

    @abstractmethod
    def keeps_rows(self, device_type: str, table: Table = ()) -> bool:
        """False if it reads them where they are, or whole."""


@runtime_checkable
class ReadsTables(Protocol):
    """A module whose operators run as measured, where `odc-triton tune` has measured them."""

    def tuned_tables(self, place: Place) -> Tuned: ...


def keep_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Modules will compute with it in `dtype`, whatever the policy: a packed weight, and what belongs to it."""
    vars(parameter)["_odc_kept_dtype"] = dtype


def kept_dtype(parameter: nn.Parameter) -> torch.dtype | None:
    return getattr(parameter, "_odc_kept_dtype", None)


def is_sharded(module: nn.Module) -> bool:
    """True if `fully_shard` gave this module the methods of a sharded one."""
    return getattr(type(module), "_odc_is_sharded", False)


_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, ShardedOperand] = weakref.WeakValueDictionary()


def handle_of(target: ShardedOperand) -> torch.Tensor:
    """A new handle of `target`."""
    number = next(_numbers)
    _objects[number] = target
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def resolve(handle: torch.Tensor) -> ShardedOperand:
    """The handle's object. Raises RuntimeError if it is gone."""
    target = _objects.get(int(handle))
    if target is None:
        raise RuntimeError("a layer's weight belongs to a sharded model that is gone; keep the model that was sharded")
    return target
