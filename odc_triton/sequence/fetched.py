"""Keys and values that a piece attends to, copied from the ranks that hold them, where memory is apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..comm.layout import aligned
from ..engine.transport import Copies, Streams

Rows = tuple[torch.Tensor, torch.Tensor]  # of keys and of values, [tokens, heads, D]


class Fetched:
    """`whole`: keys and values [P + T, heads, D], of the P tokens before a piece and of its own T.

    As with a unit's whole parameters (engine/gathered.py), the tensors stay and their storage comes and goes: freed
    after the forward, filled again for the backward, so that autograd, which saves the tensors, keeps no copy. Filling
    does not count as a change of what it has saved.
    """

    def __init__(self, before: Sequence[Rows], own: Rows, streams: Streams) -> None:
        """`before`: the rows of each earlier piece, in order; `own`: only to see shapes and dtypes."""
        self._before, self._streams = before, streams
        self._copies: Copies | None = None
        counts = [sum(len(rows) for rows, _ in before), len(own[0])]
        shapes = [(sum(counts), *rows.shape[1:]) for rows in own]
        sizes = [aligned(math.prod(shape) * rows.element_size()) for shape, rows in zip(shapes, own, strict=True)]
        self._size_bytes = sum(sizes)
        self._storage = torch.empty(self._size_bytes, dtype=torch.uint8, device=own[0].device).untyped_storage()
        self.whole: list[torch.Tensor] = []
        for shape, rows, offset in zip(shapes, own, (0, sizes[0]), strict=True):
            whole = torch.empty(0, dtype=rows.dtype, device=rows.device)
            self.whole.append(whole.set_(self._storage, offset // rows.element_size(), shape))
        # With version counters of their own.
        self._parts = [whole.data.split(counts) for whole in self.whole]
        self._storage.resize_(0)

    @torch.no_grad()
    def start(self, wait: Callable[[], None] | None = None) -> None:
        """Starts copying what is before the piece, after `wait`; does nothing if that has begun."""
        if self._copies is not None:
            return
        self._streams.allocate(self._storage, self._size_bytes)

        def copy() -> None:
            if wait is not None:
                wait()
            for kind, (before, _) in enumerate(self._parts):
                places = before.split([len(rows[kind]) for rows in self._before])
                for place, rows in zip(places, self._before, strict=True):
                    place.copy_(rows[kind], non_blocking=True)

        self._copies = self._streams.copy(self._storage, copy)

    @torch.no_grad()
    def finish(self, own: Rows) -> None:
        """From here on the current stream finds `whole` filled. `own`: the piece's own rows."""
        self.start()
        self._streams.wait(self._copies)
        for (_, place), rows in zip(self._parts, own, strict=True):
            place.copy_(rows)

    def free(self) -> None:
        if self._copies is not None:
            self._streams.free(self._storage, self._copies)
            self._copies = None
