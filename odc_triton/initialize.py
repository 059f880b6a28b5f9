"""The first values of the shards: rank 0's tensors, or each module's own initialisation, run once for all ranks."""

from __future__ import annotations

from torch import nn

from .collect import FoundParameter
from .meeting import Meetings
from .sharded_param import ShardedParameter

_STAGED_BYTES = 256 * 2**20


def write_initial_values(
    root: nn.Module, found: list[FoundParameter], parameters: list[ShardedParameter], meetings: Meetings
) -> None:
    """Fills all shards and masters. Collective.

    Rank 0 writes every parameter that it holds; what rank 0 has on the meta device is initialised by the module
    that owns it. No other rank's values count, so the weights don't depend on the number of ranks. Peak private
    memory is rank 0's own model, or one unit of it where the model is on the meta device.
    """
    if meetings.rank == 0:
        for entry, parameter in zip(found, parameters, strict=True):
            if not entry.value.is_meta:
                parameter.fill(entry.value.detach())
    meetings.meet("initial values", {})
    for entry, parameter in zip(found, parameters, strict=True):
        parameter.adopt(None if entry.value.is_meta else entry.value.detach())
