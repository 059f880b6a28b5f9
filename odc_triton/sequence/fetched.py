"""Keys and values that a pack attends to, copied from the rank that holds them, where memory is apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..comm.layout import aligned
from ..engine.transport import Copies, Streams

Rows = tuple[torch.Tensor, ...]  # of keys and of values, [tokens, heads, D], or what else a layer publishes


class Fetched:
    """A copy of `held`, in `dtypes`, from `start` until `free`."""

    def __init__(
        self, held: Rows, dtypes: Sequence[torch.dtype], streams: Streams, wait: Callable[[], None] = lambda: None
    ) -> None:
        """`wait`: before the copy, on its stream."""
        self._held, self._dtypes, self._streams, self._wait = held, dtypes, streams, wait
        self._rows: list[torch.Tensor] = []
        self._storage: torch.UntypedStorage  # from `start` on, as `_copies`
        self._copies: Copies

    @torch.no_grad()
    def start(self) -> None:
        """Starts copying."""
        device = self._held[0].device
        sizes = [aligned(math.prod(x.shape) * t.itemsize) for x, t in zip(self._held, self._dtypes, strict=True)]
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self._streams.allocate(self._storage, sum(sizes))
        for rows, dtype, offset in zip(self._held, self._dtypes, accumulate([0, *sizes[:-1]]), strict=True):
            place: Any = torch.empty(0, dtype=dtype, device=device)  # torch's stub of `set_` wants strides
            self._rows.append(place.set_(self._storage, offset // dtype.itemsize, rows.shape))

        def copy() -> None:
            self._wait()
            for place, rows in zip(self._rows, self._held, strict=True):
                place.copy_(rows, non_blocking=True)

        self._copies = self._streams.copy(self._storage, copy)

    def finish(self) -> Rows:
        """The rows, filled for the current stream from here on."""
        self._streams.wait(self._copies)
        return tuple(self._rows)

    def free(self) -> None:
        self._streams.free(self._storage, self._copies)


class SharedRows(Fetched):
    """The same where ranks share one memory: views, which need no copy."""

    def start(self) -> None:
        pass

    def finish(self) -> Rows:
        self._wait()
        return tuple(rows.to(dtype) for rows, dtype in zip(self._held, self._dtypes, strict=True))

    def free(self) -> None:
        pass
