"""The owners of rows, and their places in the heap. Pure: imports neither torch nor triton."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

ALIGNMENT_BYTES = 128  # of a shard's address, for a tensor-memory-access descriptor


def shard_rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    """First and one-past-last row that `rank` owns of `rows`: split as `torch.chunk` does.

    Every rank gets ceil(rows / world) rows; the last ones get fewer or none.
    """
    each = rows_per_rank(rows, world)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def rows_per_rank(rows: int, world: int) -> int:
    """ceil(rows / world): the rows of every rank but the last ones."""
    return -(-rows // world)


EXACT = "int64"  # the reduce dtype of exact sums: engine/exact.py


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter, as all ranks must agree on it. Dtypes are names ("float32"); `names` includes tied aliases.

    A scalar is sharded as a tensor of shape (1,), which rank 0 owns; `is_scalar`: modules see it as 0-d.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    master_dtype: str
    compute_dtype: str
    reduce_dtype: str | None  # None: frozen, no gradient region
    unit: str  # name of the unit that it belongs to; "" is the root
    is_scalar: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """As modules see it."""
        return () if self.is_scalar else self.shape

    @property
    def is_block_matrix(self) -> bool:
        """True for a matrix of a block, as Muon takes them. Embeddings and heads belong to the root."""
        return len(self.shape) == 2 and self.unit != ""

    @property
    def has_own_master(self) -> bool:
        """True if the master is a copy of its own, not the compute shard."""
        return self.master_dtype != self.compute_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A whole tensor in the heap, row-major, at `offset_bytes`: in one memory that holds its owners' shards side by
    side, or in each owner's own memory, which holds only its rows.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    offset_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    def shard(self, world: int, owner: int) -> Region:
        """The rows of `owner` as a region, if all shards are side by side."""
        own = self.own_shard(world, owner)
        start, _ = shard_rows(self.shape[0], world, owner)
        return replace(own, offset_bytes=self.offset_bytes + start * self.row_bytes)

    def own_shard(self, world: int, owner: int) -> Region:
        """The rows of `owner` as a region of its own memory, where every rank keeps its shard at the same offset."""
        start, stop = shard_rows(self.shape[0], world, owner)
        return replace(self, shape=(stop - start, *self.shape[1:]))

    def stored_bytes(self, world: int, *, apart: bool) -> int:
        """Bytes that it takes in the memory of all ranks, or, `apart`, in each rank's."""
        if not apart:
            return self.size_bytes
        return rows_per_rank(self.shape[0], world) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """Every region of the heap, in an order that is the same on all ranks."""

    parameters: tuple[ParameterSpec, ...]
    compute: tuple[Region, ...]
    gradient: tuple[Region | None, ...]
    size_bytes: int
    compute_bytes: int

    @property
    def gradient_bytes(self) -> int:
        return self.size_bytes - self.compute_bytes

    def fingerprint(self, options: dict[str, Any]) -> tuple[str, list[str]]:
        """A digest that agrees on all ranks exactly if their plans and options do, and the lines it was made from."""
        lines = [f"option {key} = {value}" for key, value in sorted(options.items())]
        lines += [json.dumps(asdict(spec)) for spec in self.parameters]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest(), lines


def first_difference(mine: list[str], theirs: list[str]) -> str:
    """Describes the first line in which two fingerprints differ."""
    for a, b in zip(mine, theirs, strict=False):
        if a != b and not a.startswith("{"):
            return f"{a}  against  {b}"
        if a != b:
            return _between(json.loads(a), json.loads(b))
    longer, whose = (mine, "only here") if len(mine) > len(theirs) else (theirs, "only there")
    line = longer[min(len(mine), len(theirs))]
    return f"{', '.join(json.loads(line)['names']) if line.startswith('{') else line} is {whose}"


def _between(one: dict[str, Any], other: dict[str, Any]) -> str:
    """What two parameters at one place differ in."""
    name, changed = " and ".join(one["names"]), [key for key in one if one[key] != other[key]]
    if "names" in changed:
        return f"{name} {one['shape']}  against  {' and '.join(other['names'])} {other['shape']}"
    dtypes = one["reduce_dtype"], other["reduce_dtype"]
    if changed == ["reduce_dtype"] and None in dtypes:
        return f"{name} is frozen on the {'second' if dtypes[0] else 'first'} only"
    return f"{name} has " + ", ".join(f"{key} {one[key]}  against  {other[key]}" for key in changed)


def aligned(offset_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """`offset_bytes`, rounded up; by default to where the next region may begin."""
    return -(-offset_bytes // alignment_bytes) * alignment_bytes


def make_layout(
    parameters: list[ParameterSpec], *, world: int, itemsizes: dict[str, int], apart: bool = False
) -> MemoryLayout:
    """Lays out the regions: all compute shards, then all gradient shards, each aligned to 128 bytes.

    `itemsizes`: bytes per element by dtype name. `apart`: each rank's shards are in its own memory, so sizes and
    offsets are one rank's; else one memory holds all.
    """

    def place(dtypes: list[tuple[ParameterSpec, str]], offset_bytes: int) -> tuple[list[Region], int]:
        tensors = [(spec.shape, dtype, itemsizes[dtype]) for spec, dtype in dtypes]
        return place_regions(tensors, world=world, apart=apart, offset_bytes=offset_bytes)

    compute, compute_bytes = place([(spec, spec.compute_dtype) for spec in parameters], 0)
    trained = [(spec, spec.reduce_dtype) for spec in parameters if spec.reduce_dtype is not None]
    gradient, size_bytes = place(trained, compute_bytes)
    left = iter(gradient)
    return MemoryLayout(
        parameters=tuple(parameters),
        compute=tuple(compute),
        gradient=tuple(None if spec.reduce_dtype is None else next(left) for spec in parameters),
        size_bytes=size_bytes,
        compute_bytes=compute_bytes,
    )


def place_regions(
    tensors: Iterable[tuple[tuple[int, ...], str, int]], *, world: int, apart: bool, offset_bytes: int = 0
) -> tuple[list[Region], int]:
    """Regions one after another from `offset_bytes` on, and where the last ends. A tensor: (shape, dtype, itemsize)."""
    regions = []
    for shape, dtype, itemsize in tensors:
        region = Region(shape=shape, dtype=dtype, itemsize=itemsize, offset_bytes=aligned(offset_bytes))
        offset_bytes = region.offset_bytes + region.stored_bytes(world, apart=apart)
        regions.append(region)
    return regions, offset_bytes


def find_units(module: Any) -> list[str]:
    """Names of the submodules that are gathered as one unit each, in registration order; the root is implied.

    The modules of the classes in a transformers model's `_no_split_modules`, else the children of the longest
    ModuleList (the first of equals), else none. Units may not nest: the outermost is taken.
    """
    named = [(name, child) for name, child in module.named_modules() if name]
    classes = set(getattr(module, "_no_split_modules", None) or ())
    found = [name for name, child in named if type(child).__name__ in classes]
    if not found:
        lists = [(name, child) for name, child in named if type(child).__name__ == "ModuleList" and len(child) > 1]
        if lists:
            name, longest = max(lists, key=lambda item: len(item[1]))
            # A list of lists is not a unit: it has no forward, and its parameters belong to the root.
            found = [
                f"{name}.{key}"
                for key, child in longest.named_children()
                if type(child).__name__ not in ("ModuleList", "ModuleDict")
            ]
    outermost: list[str] = []
    for name in found:
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost.append(name)
    return outermost
