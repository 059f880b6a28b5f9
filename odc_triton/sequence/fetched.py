"""Keys and values that a pack attends to, copied from the ranks that hold them, where memory is apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..comm.layout import aligned
from ..engine.transport import Copies, Streams

Rows = tuple[torch.Tensor, torch.Tensor]  # of keys and of values, [tokens, heads, D]


class Fetched:
    """`rows`: keys and values [P, heads, D] of P tokens that one or several ranks hold.

    As with a unit's whole parameters (engine/gathered.py), the tensors stay and their storage comes and goes: freed
    after the forward, filled again for the backward, so that autograd, which saves the tensors, keeps no copy. Filling
    does not count as a change of what it has saved.
    """

    def __init__(self, held: Sequence[Rows], dtypes: Sequence[torch.dtype], streams: Streams) -> None:
        """`held`: the rows of each piece, in order; `dtypes`: that keys and values get."""
        self._held, self._streams = held, streams
        self._copies: Copies | None = None
        tokens = sum(len(keys) for keys, _ in held)
        shapes = [(tokens, *each.shape[1:]) for each in held[0]]
        sizes = [aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._size_bytes, device = sum(sizes), held[0][0].device
        self._storage = torch.empty(self._size_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self.rows: list[torch.Tensor] = []
        for shape, dtype, offset in zip(shapes, dtypes, (0, sizes[0]), strict=True):
            whole = torch.empty(0, dtype=dtype, device=device)
            self.rows.append(whole.set_(self._storage, offset // dtype.itemsize, shape))
        # With version counters of their own.
        self._places = [rows.data.split([len(keys) for keys, _ in held]) for rows in self.rows]
        self._storage.resize_(0)

    @torch.no_grad()
    def start(self, wait: Callable[[], None] | None = None) -> None:
        """Starts copying, after `wait`; does nothing if that has begun."""
        if self._copies is not None:
            return
        self._streams.allocate(self._storage, self._size_bytes)

        def copy() -> None:
            if wait is not None:
                wait()
            for kind, places in enumerate(self._places):
                for place, rows in zip(places, self._held, strict=True):
                    place.copy_(rows[kind], non_blocking=True)

        self._copies = self._streams.copy(self._storage, copy)

    def finish(self) -> None:
        """From here on the current stream finds `rows` filled."""
        self.start()
        self._streams.wait(self._copies)

    def free(self) -> None:
        if self._copies is not None:
            self._streams.free(self._storage, self._copies)
            self._copies = None
