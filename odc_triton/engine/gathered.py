"""Whole parameters of one unit, where shards are apart: gathered before they are needed, freed afterwards."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from odc_kernels.batch_copy import Batch, BatchCopy

from ..comm.layout import ParameterSpec, aligned
from .transport import COPY_STREAMS, Copies, Streams, named

if TYPE_CHECKING:
    from odc_kernels.gather import ShardList

_OLD = -1  # not the number of any weight update
# A copy engine takes about 3 µs to begin a copy, in which 1.1 MB would cross a link at its 380 GB/s. So one launch for
# all is faster up to about that size. Above it the engine is better: it takes no multiprocessor from what computes.
_SMALL_SHARD_BYTES = 2**20


class _OwnerRows(NamedTuple):
    """An owner's rows of one parameter, and where they go."""

    owner: int
    place: torch.Tensor
    rows: torch.Tensor


class GatheredParameters:
    """One storage for all whole parameters of a unit, of which autograd may save views.

    As in FSDP2 the tensors stay and their storage comes and goes: what autograd saved in the forward is valid again
    as soon as the storage is filled for the backward, and no gathered weight is kept between the two. Filling goes
    through tensors with their own version counters, so it does not count as a change of a saved weight.

    `shards`: per parameter its owners' rows, in order of the owners. `whole`: the tensors, in the same order.
    `near`: ranks whose memory is on this rank's GPU. `by_kernel`: one launch copies all small shards; else each is a
    copy, as large ones are. `batch_copy`: makes all copies of a stream in one call.
    """

    def __init__(
        self,
        specs: list[ParameterSpec],
        shards: list[list[torch.Tensor]],
        *,
        rank: int,
        streams: Streams,
        near: frozenset[int] = frozenset(),
        by_kernel: bool = False,
        batch_copy: BatchCopy | None = None,
    ) -> None:
        self._streams, self._batch_copy = streams, batch_copy
        self._users: set[Hashable] = set()
        self._filled_at: int | None = None  # the weight update that the storage holds
        self._copies: Copies | None = None  # those that filled it
        device = shards[0][0].device
        large: list[_OwnerRows] = []
        small: dict[torch.dtype, list[_OwnerRows]] = {}
        offsets, self._size_bytes = [], 0
        for spec, owners in zip(specs, shards, strict=True):
            offsets.append(self._size_bytes)
            self._size_bytes += aligned(math.prod(spec.shape) * owners[0].element_size())
        flat = torch.empty(self._size_bytes, dtype=torch.uint8, device=device)
        self._storage = flat.untyped_storage()
        self.whole = []
        for spec, owners, offset in zip(specs, shards, offsets, strict=True):
            dtype = owners[0].dtype
            stride = torch.empty(spec.shape, device="meta").stride()
            tensor = torch.empty(0, dtype=dtype, device=device)
            tensor.set_(self._storage, offset // dtype.itemsize, spec.shape, stride)
            self.whole.append(tensor)
            is_read_by_kernels = dtype.is_floating_point and dtype.itemsize > 1
            is_small = (
                by_kernel and is_read_by_kernels and 0 < max(rows.nbytes for rows in owners) <= _SMALL_SHARD_BYTES
            )
            into = small.setdefault(dtype, []) if is_small else large
            into.extend(_parts(tensor.data, owners))

        def turn(part: _OwnerRows) -> tuple[bool, int]:
            """Near rows come first, own before others; then the next rank's, so all ranks read different owners."""
            return part.owner not in near | {rank}, (part.owner - rank) % len(shards[0])

        large.sort(key=turn)
        # What each stream copies.
        self._large = [
            [each for each in large if turn(each)[1] % COPY_STREAMS == stream] for stream in range(COPY_STREAMS)
        ]
        self._batches = []
        for parts in self._large if batch_copy is not None else ():
            places = [(int(each.place.storage_offset()) * each.place.itemsize, each.rows) for each in parts]
            self._batches.append(Batch.of(places, near=sum(not turn(each)[0] for each in parts)))
        self._small: list[tuple[ShardList, torch.Tensor]] = []
        for dtype, parts in small.items():
            from odc_kernels.gather import ShardList  # here, as importing triton takes a second

            parts.sort(key=turn)
            rows, offsets = [each.rows for each in parts], [int(each.place.storage_offset()) for each in parts]
            flat = torch.empty(0, dtype=dtype, device=device)
            flat.set_(self._storage, 0, (self._size_bytes // dtype.itemsize,), (1,))
            self._small.append((ShardList.of(rows, offsets), flat))
        self._storage.resize_(0)

    @property
    def is_filled(self) -> bool:
        return self._filled_at is not None

    def serves(self, user: Hashable) -> bool:
        """True while it is kept for `user`."""
        return user in self._users

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for a tensor in this storage."""
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata == self._storage._cdata

    def expire(self) -> None:
        """Makes the next fetch refill the storage: what it holds may be old."""
        if self.is_filled:
            self._filled_at = _OLD

    def fetch(self, user: Hashable, publication: int) -> None:
        """Starts filling the storage, unless it holds that weight update already, and keeps it for `user`."""
        self._users.add(user)
        if self._filled_at == publication:
            return
        if self._storage.nbytes() != self._size_bytes:  # even at the same size CUDA would allocate another and copy it
            self._streams.allocate(self._storage, self._size_bytes)
        streams = [stream for stream, large in enumerate(self._large) if large or (self._small and stream == 0)]
        self._copies = self._streams.copy(self._storage, *(partial(self._fill, stream) for stream in streams))
        self._filled_at = publication

    def _fill(self, stream: int) -> None:
        """Makes the copies of one of the streams."""
        with named("odc.gather"):
            for parts, flat in self._small if stream == 0 else ():
                from odc_kernels.gather import gather_many

                gather_many(shards=parts, out=flat)
            if self._batch_copy is None:
                for each in self._large[stream]:
                    each.place.copy_(each.rows, non_blocking=True)
            elif self._large[stream]:
                self._batch_copy(self._batches[stream], self._storage.data_ptr())

    def wait(self) -> None:
        """From here on, what this stream computes finds the storage filled."""
        if self._copies is not None:
            self._streams.wait(self._copies)

    def release(self, user: Hashable) -> None:
        """Frees the storage if `user` was the last to need it."""
        self._users.discard(user)
        if not self._users and self._copies is not None:
            self._streams.free(self._storage, self._copies)
            self._copies, self._filled_at = None, None


def _parts(whole: torch.Tensor, owners: list[torch.Tensor]) -> Iterator[_OwnerRows]:
    """Those of all owners that have some rows; `whole` has its own version counter."""
    for owner, place in enumerate(whole.split([len(rows) for rows in owners])):
        if place.numel():
            yield _OwnerRows(owner, place, owners[owner])
