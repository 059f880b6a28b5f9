"""What is done to all shards of a rank at once, between microbatches: a launch per dtype, not one per parameter.

By torch's multi-tensor operators (`torch._foreach_*`), which optimizers use too. On CUDA they take one launch for as
many tensors as an argument list holds, also from one dtype to another, where all tensors of a list have one device and
dtype and each pair has one shape and stride; elsewhere, and on the CPU, they go tensor by tensor with the same result.
So lists are made by dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ..comm.replicas import Replicas
from .parameter import ShardedParameter
from .streams import Streams


def _by_kind(rows: Iterable[tuple[torch.Tensor, ...]]) -> list[tuple[list[torch.Tensor], ...]]:
    """Rows of tensors that belong together, as columns: one tuple of lists for each combination of dtype and device."""
    kinds: dict[tuple, list[tuple[torch.Tensor, ...]]] = {}
    for row in rows:
        if row[0].numel():
            kinds.setdefault(tuple((each.dtype, each.device) for each in row), []).append(row)
    return [tuple(map(list, zip(*kind, strict=True))) for kind in kinds.values()]


@torch.no_grad()
def copy_masters(parameters: Sequence[ShardedParameter], streams: Streams) -> None:
    """Makes all masters readable: a cast where the copy to read is of another dtype, nothing where they are one."""
    for compute, masters in _by_kind(filter(None, (parameter.to_publish() for parameter in parameters))):
        streams.compute(partial(torch._foreach_copy_, compute, masters))


@torch.no_grad()
def clear_gradients(parameters: Sequence[ShardedParameter], streams: Streams) -> None:
    """Zeroes the own gradient shards for the next minibatch."""
    for (shards,) in _by_kind((shard,) for p in parameters if (shard := p.to_clear()) is not None):
        streams.compute(partial(torch._foreach_zero_, shards))


@torch.no_grad()
def land_gradients(
    parameters: Sequence[ShardedParameter], divisor: float, replicas: Replicas, streams: Streams
) -> None:
    """Hands the landed gradients, summed over the replicas, divided by `divisor` and in their masters' dtypes, to the
    optimizer.
    """
    gradients = [parameter.own_gradient() for parameter in parameters]
    if replicas.count > 1:
        replicas.sum_parts([p.gradient_parts() for p in parameters if not p.spec.is_scalar])
        replicas.sum_whole([own for p, own in zip(parameters, gradients, strict=True) if p.spec.is_scalar])
    if divisor != 1:
        for (own,) in _by_kind((gradient,) for gradient in gradients):
            streams.compute(partial(torch._foreach_div_, own, divisor))
    casts = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient.dtype != parameter.master.dtype:
            cast = torch.empty_like(gradient, dtype=parameter.master.dtype)
            casts.append((cast, gradient))
            gradient = cast
        parameter.land(gradient)
    for cast, own in _by_kind(casts):
        streams.compute(partial(torch._foreach_copy_, cast, own))
