"""A sharded tensor for kernels: a table of its owners' addresses."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

ALL = "all"
"""For `near`: all shards are in the memory of the kernels' own device, as in a test or with all ranks on one GPU."""

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16  # of every shard's address: a vector load or a cp.async of 16 bytes needs it


def rows_per_owner(rows: int, world: int) -> int:
    """n = ceil(rows / world): as in `torch.chunk`, the last owners have fewer or none."""
    return -(-rows // world)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAdds:
    """Additions of g to shards of integers: trunc(g * factor), int64; `factor` is a power of two.

    `largest`: int32 [1] on the kernels' device; becomes at least the bits of every |g| in fp32, also of NaN and
    infinity. A g with |g * factor| >= 2^62 is not added, so check `largest` before using the sums.
    """

    factor: float
    largest: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerShards:
    """The shards of one tensor [N, ...], split on dim 0 as by `torch.chunk`: ceil(N / world) rows each, the last fewer.

    table: int64 [world], on the kernels' device; entry r is the address of owner r's first row.
    shape: of the whole tensor.
    rank: this one among the owners.
    dtype: of the rows.
    near: the owners whose memory is on the kernels' own device; the rows of all others cross a link.
    shards: the rows, entry r of shape [rows of r, ...], contiguous; this also keeps their memory alive. Kernels don't
        need it.
    exact: scale and overflow state, if the shards are int64 sums.
    """

    table: torch.Tensor
    shape: tuple[int, ...]
    rank: int
    dtype: torch.dtype
    near: frozenset[int]
    shards: tuple[torch.Tensor, ...] = ()
    exact: ExactAdds | None = None

    @property
    def world(self) -> int:
        return self.table.numel()

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def rows_per_owner(self) -> int:
        return rows_per_owner(self.shape[0], self.world)

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def layout(self) -> tuple[int, int, int, int, int]:
        """What kernels take of how it is split: rows, rows per owner, elements of a row, rank, world."""
        return self.shape[0], self.rows_per_owner, self.row_elements, self.rank, self.world

    def rows(self, owner: int) -> int:
        """The number of `owner`'s rows, may be 0."""
        return min(max(self.shape[0] - owner * self.rows_per_owner, 0), self.rows_per_owner)

    @property
    def far(self) -> list[int]:
        """The owners whose rows cross a link."""
        return [owner for owner in range(self.world) if owner not in self.near]

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of shards that kernels add to."""
        return torch.float32 if self.exact is None else torch.int64

    @property
    def adding(self) -> tuple[float, torch.Tensor | None]:
        """`factor` and `largest` of kernels that add."""
        return (1.0, None) if self.exact is None else (self.exact.factor, self.exact.largest)

    @classmethod
    def of(
        cls,
        shards: Sequence[torch.Tensor],
        *,
        shape: Sequence[int],
        rank: int = 0,
        device: torch.device | None = None,
        aligned: bool = True,
        near: Collection[int] | Literal["all"] | None = None,
    ) -> PeerShards:
        """From the owners' tensors: views of peers' memory, or plain tensors in a test or on one GPU.

            weight = PeerShards.of([whole[:2], whole[2:]], shape=whole.shape)  # two owners of three rows

        The host waits for the table's copy, after which kernels on any stream may use it, so reuse the result.

        shards: entry r has owner r's rows.
        shape: of the whole tensor.
        rank: this one among the owners.
        device: the kernels' device, by default the shards'. If given, shards may also be in pinned host memory: under
            unified addressing kernels read and write it at the same address, over the bus.
        aligned: False only for plain torch on a CPU, where addresses don't matter.
        near: the owners on the kernels' device, by default this rank alone, or `ALL`.

        Raises ValueError for shards of a wrong shape, dtype, device or layout, or at an address that is not a multiple
        of 16 bytes.
        """
        shape, shards = tuple(shape), tuple(shards)
        if not shards:
            raise ValueError("shards is empty; give one tensor per owner")
        if not 0 <= rank < len(shards):
            raise ValueError(f"rank is {rank}; it must be in 0..{len(shards) - 1}")
        first = shards[0]
        table = torch.tensor([s.data_ptr() for s in shards], dtype=torch.int64, device=device or first.device)
        near = frozenset(range(len(shards)) if near == ALL else (rank,) if near is None else near)
        if not near <= set(range(len(shards))):
            raise ValueError(f"near is {set(near)}; give owners of 0..{len(shards) - 1}, or ALL")
        peers = cls(table=table, shape=shape, rank=rank, dtype=first.dtype, near=near, shards=shards)
        peers._check(device, aligned)
        return peers

    @classmethod
    def local(cls, whole: torch.Tensor) -> PeerShards:
        """A whole tensor in this device's memory, as the one shard of a world of one.

        Only for kernels on the current stream, which writes the table; the host does not wait. Raises ValueError as
        `of` does.
        """
        table = torch.full((1,), whole.data_ptr(), dtype=torch.int64, device=whole.device)
        peers = cls(
            table=table, shape=tuple(whole.shape), rank=0, dtype=whole.dtype, near=frozenset({0}), shards=(whole,)
        )
        peers._check(None, aligned=whole.is_cuda)
        return peers

    @classmethod
    def symmetric(
        cls, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, rows: int | None = None
    ) -> PeerShards:
        """The tensors that the ranks of `group` (all ranks by default) hold in torch's symmetric memory.

        Collective, and the host waits. It exchanges addresses, not contents: before a rank reads or adds, the owners
        call a barrier. Owners on this rank's GPU are near.

        tensor: this rank's rows [n, ...], from `torch.distributed._symmetric_memory.empty`, of one shape and dtype on
            all ranks.
        rows: N of the whole tensor, by default n * world; n must be ceil(N / world). Of the last owners' tensors only
            the first rows count, maybe none.

        Raises ValueError on every rank if ranks gave different shapes, strides, dtypes or rows, or if these don't
        match; ValueError or RuntimeError for memory that is not symmetric or out of reach.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        group = group or dist.group.WORLD
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("this rank is not in the group; call `symmetric` on the group's ranks only")
        rows = len(tensor) * world if rows is None else rows
        mine = {"shape": (*tensor.shape,), "strides": tensor.stride(), "dtype": tensor.dtype, "rows": rows}
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, (mine, _gpu_of(tensor)), group)
        for peer, (theirs, _) in enumerate(gathered):
            if theirs != gathered[0][0]:
                raise ValueError(f"rank {peer} of the group gave {theirs} and rank 0 {gathered[0][0]}; all must agree")
        if len(tensor) != rows_per_owner(rows, world):
            raise ValueError(
                f"the tensor is {(*tensor.shape,)}; for {rows} rows on {world} ranks allocate "
                f"{rows_per_owner(rows, world)} on each"
            )
        handle = symmetric_memory.rendezvous(tensor, group)
        if handle is None:
            raise ValueError("the tensor is not in symmetric memory; make it by torch's _symmetric_memory.empty")
        shards = []
        for peer in range(world):
            # The local tensor, as it keeps the memory and this rank's views of the peers' alive.
            shard = tensor if peer == rank else handle.get_remote_tensor(peer, tensor.shape, tensor.dtype)
            shards.append(shard[: max(min(rows - peer * len(tensor), len(tensor)), 0)])
        near = [peer for peer, (_, gpu) in enumerate(gathered) if gpu == gathered[rank][1]]
        return cls.of(shards, shape=(rows, *tensor.shape[1:]), rank=rank, near=near)

    def _check(self, device: torch.device | None, aligned: bool) -> None:
        if not self.shape:
            raise ValueError("shape is (); a scalar is not sharded")
        first = self.shards[0]
        for owner, shard in enumerate(self.shards):
            want = (self.rows(owner), *self.shape[1:])
            if tuple(shard.shape) != want:
                raise ValueError(f"owner {owner}'s shard has shape {tuple(shard.shape)}; of {self.shape} give {want}")
            if shard.dtype != first.dtype or (device is None and shard.device != first.device):
                raise ValueError(
                    f"owner {owner}'s shard is {shard.dtype} on {shard.device}, owner 0's {first.dtype} on "
                    f"{first.device}; all must agree"
                )
            if device is not None and shard.device != device and not shard.is_pinned():
                raise ValueError(f"owner {owner}'s shard is on {shard.device}; put it on {device} or pin its memory")
            if not shard.is_contiguous():
                raise ValueError(f"owner {owner}'s shard has strides {shard.stride()}; it must be contiguous")
            if aligned and shard.numel() and shard.data_ptr() % ALIGNMENT_BYTES:
                raise ValueError(
                    f"owner {owner}'s shard is at {shard.data_ptr():#x}; align it to {ALIGNMENT_BYTES} bytes"
                )


def _gpu_of(tensor: torch.Tensor) -> str:
    """The same on all ranks of a GPU, for any local index."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.is_cuda else str(tensor.device)


def check_tensor(
    what: str,
    given: torch.Tensor,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    contiguous: bool = True,
) -> None:
    """Raises ValueError unless `given` has that shape, one of these dtypes, and that device, and is contiguous."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    has = tuple(given.shape) == shape and given.dtype in dtypes and given.device == device
    if not has or (contiguous and not given.is_contiguous()):
        raise ValueError(
            f"{what} is {given.dtype} {tuple(given.shape)} with strides {given.stride()} on {given.device}; give "
            f"{'a contiguous ' * contiguous}{' or '.join(map(str, dtypes))} {shape} on {device}"
        )


def check_apart(what: str, written: torch.Tensor | None, *read: torch.Tensor | PeerShards | None) -> None:
    """Raises ValueError if a kernel would write what it reads: contiguous tensors, and own shards."""
    if written is None:
        return
    first, size = written.data_ptr(), written.nbytes
    for given in read:
        for each in given.shards[given.rank : given.rank + 1] if isinstance(given, PeerShards) else (given,):
            if each is None or not each.nbytes or not each.is_contiguous():  # an expanded one has less memory
                continue
            if each.data_ptr() - size < first < each.data_ptr() + each.nbytes:
                raise ValueError(f"{what} shares memory with an input of this operator; give memory of its own")


def require_shards(what: str, given: Any) -> None:
    """Raises TypeError for a plain tensor in place of shards."""
    if isinstance(given, torch.Tensor):
        raise TypeError(
            f"{what} is a plain tensor; give PeerShards: PeerShards.local(tensor) of a whole one on this device, "
            f"PeerShards.of(shards, shape=…) of all owners' rows, or PeerShards.symmetric(rows) of symmetric memory"
        )


def check_matrix(weight: Any, what: str = "the weight") -> None:
    """Raises ValueError unless a weight is a matrix, in a dtype that products take."""
    require_shards(what, weight)
    if len(weight.shape) != 2:
        raise ValueError(f"{what} is {weight.shape}; give two dimensions [N, K]")
    if weight.dtype not in COMPUTE_DTYPES:
        raise ValueError(f"{what} is {weight.dtype}; give float32, bfloat16 or float16")


def check_sums(shards: PeerShards) -> None:
    """Raises ValueError unless kernels can add gradients to these shards."""
    require_shards("what gradients are added to", shards)
    if shards.dtype != shards.sum_dtype:
        raise ValueError(
            f"the shards are {shards.dtype} with exact={shards.exact}; gradients are summed in float32 "
            f"(reduce_dtype=None), or in int64 with `exact`"
        )


def check_bias(bias: PeerShards, weight: PeerShards, *, shape: tuple[int, ...] | None = None) -> None:
    """Raises ValueError unless the shards of a bias, by default [N], match those of a weight [N, K]."""
    check_alike("the bias", bias, "weight", weight, shape=shape or weight.shape[:1], dtype=weight.dtype)


def check_alike(
    what: str, given: PeerShards, beside: str, other: Any, *, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raises ValueError unless `given` has that shape and dtype and the world, rank and device of `other`."""
    require_shards(what, given)
    wanted = {"shape": shape, "dtype": dtype, "world": other.world, "rank": other.rank, "device": other.device}
    for name, want in wanted.items():
        have = getattr(given, name)
        if have != want:
            raise ValueError(f"{what} has {name} {have}; this {beside} needs {name} {want}")


def shards_of(whole: torch.Tensor, world: int) -> list[torch.Tensor]:
    """The owners' shards of a whole tensor [N, ...], as separate copies."""
    each = rows_per_owner(whole.shape[0], world)
    return [whole[owner * each : (owner + 1) * each].clone().contiguous() for owner in range(world)]


def join(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor; the inverse of `shards_of`."""
    return torch.cat(list(shards))
