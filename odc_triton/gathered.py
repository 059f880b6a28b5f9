"""Whole parameters of one unit, where shards lie apart: gathered before they are needed, freed afterwards."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch.profiler import record_function

from .plan import ParameterSpec, aligned
from .streams import Copies, Streams

_OLD = -1  # a publication that there never is


class GatheredParameters:
    """One storage for all whole parameters of a unit, of which autograd may save views.

    As in FSDP2 the tensors stay the same and their storage comes and goes, so what autograd saved in the forward is
    right again as soon as the storage is filled for the backward, and no gathered weight is kept between the two.
    Filling goes through tensors of their own version counters: it is no change of a saved weight.

    `shards`: per parameter its owners' rows, in order of the owners. `whole`: the tensors, in the same order.
    """

    def __init__(
        self, specs: list[ParameterSpec], shards: list[list[torch.Tensor]], *, rank: int, streams: Streams
    ) -> None:
        self._rank, self._streams, self._shards = rank, streams, shards
        self._users: set[Hashable] = set()
        self._filled_at: int | None = None  # the publication that the storage holds
        self._copies: Copies | None = None  # those that filled it
        self._is_waited = True  # what is computed now follows them
        device = shards[0][0].device
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
        self._writable = [tensor.data for tensor in self.whole]
        self._storage.resize_(0)

    @property
    def is_filled(self) -> bool:
        return self._filled_at is not None

    def serves(self, user: Hashable) -> bool:
        """Whether it is kept for `user`."""
        return user in self._users

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this storage."""
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata == self._storage._cdata

    def expire(self) -> None:
        """Has the next fetch fill the storage anew, as what it holds may be old."""
        if self.is_filled:
            self._filled_at = _OLD

    @torch.no_grad()
    def fetch(self, user: Hashable, publication: int) -> None:
        """Begins to fill the storage, unless it holds that publication already, and keeps it for `user`."""
        self._users.add(user)
        if self._filled_at == publication:
            return
        self.wait()
        if self._storage.nbytes() != self._size_bytes:  # at its own size too, CUDA would allocate another and copy it
            self._storage.resize_(self._size_bytes)
        with record_function("odc.gather"), self._streams.copying() as self._copies:
            for writable, owners in zip(self._writable, self._shards, strict=True):
                if not writable.shape:
                    writable.copy_(owners[0])
                    continue
                rows = writable.split([len(owner) for owner in owners])
                for step in range(len(owners)):  # the own shard first, then the next ranks': all read different owners
                    peer = (self._rank + step) % len(owners)
                    rows[peer].copy_(owners[peer], non_blocking=True)
        self._is_waited, self._filled_at = False, publication

    def wait(self) -> None:
        """What is computed from here on finds the storage filled."""
        if not self._is_waited:
            self._streams.wait(self._copies)
            self._is_waited = True

    def release(self, user: Hashable) -> None:
        """Frees the storage if `user` was the last that needs it."""
        self._users.discard(user)
        if not self._users and self.is_filled:
            self._streams.before_freeing(self._copies)
            self._storage.resize_(0)
            self._copies, self._is_waited, self._filled_at = None, True, None
