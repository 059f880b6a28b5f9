"""Edits in place of parameters that other ranks are reading.

[Note: edits that don't show] Autograd's version counters show an edit of a parameter, of its local shard, or of the
whole tensor in a forward. They don't show one through `.data`, or by `torch._foreach_*` on DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch.distributed.tensor import DTensor


class Edits:
    """Whether any of `tensors` was edited since `begin`."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        pairs = ((each, each._local_tensor) if isinstance(each, DTensor) else (each,) for each in tensors)
        self._tensors = list(chain.from_iterable(pairs))
        self.begin()

    def begin(self) -> None:
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def refuse(self, name: str) -> None:
        """Raises RuntimeError if there was one. `name`: the parameter's."""
        if self._now() != self._versions:
            raise RuntimeError(
                f"{name} was edited in place inside a minibatch, while other ranks read it. Edit parameters after the "
                f"minibatch, on all ranks, and call publish(model) before the next forward"
            )
