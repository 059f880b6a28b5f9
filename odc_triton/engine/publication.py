"""Which values of the parameters may be read: what this rank has published, and what its peers have.

And what is done to all shards of a rank at once, between minibatches: one launch per dtype, not per parameter.

It uses torch's multi-tensor operators (`torch._foreach_*`), as optimizers do. On CUDA one launch takes as many tensors
as an argument list holds, also from one dtype to another, if all tensors of a list have one device and dtype and each
pair has one shape and stride; otherwise, and on the CPU, they go tensor by tensor with the same result. So lists are
made by dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

import torch

from ..comm.barrier import Barrier
from ..comm.memory.heap import Status, SymmetricHeap
from ..comm.replicas import Replicas
from .landing import PendingGradient
from .sharded import Sharded
from .streams import Streams


class Publication:
    """This rank's count of publications, which peers wait for outside of a minibatch.

    `number`: publications so far; 0 before the first.
    """

    def __init__(self, heap: SymmetricHeap, barrier: Barrier) -> None:
        self._first, self._barrier = heap.first, barrier
        self._published = Status(heap)  # how many times the rank has published its shards
        self._stepping = Status(heap)  # one more while the rank may be writing its shards
        self.number = 0
        self._reading = 0  # the publication that an evaluation reads

    def _of_owners(self, status: Status) -> Iterable[tuple[int, int]]:
        """(rank, status) of the owners that this rank reads: those of its own replica."""
        return enumerate(status.seen(), self._first)

    def announce(self) -> None:
        """Announces that this rank may write its shards from here on: readers must not miss it."""
        self._stepping.show(self.number + 1)

    def complete(self) -> None:
        """Announces that this rank's shards are readable as they are now."""
        self.number += 1
        self._published.show(self.number)

    def agree(self, number: int) -> None:
        """Continues from a number that all ranks agreed on at a barrier, with everything published."""
        self.number = number
        self._published.show(number)
        self._stepping.show(number)

    def wait_readable(self) -> None:
        """Waits until every owner has published as often as this rank has."""
        mine = self._reading = self.number
        self._barrier.wait_until(
            f"publication {mine} of the parameters",
            lambda: [rank for rank, count in self._of_owners(self._published) if count < mine],
        )

    def check_not_torn(self) -> None:
        """Raises if an owner may have stepped while this rank was reading outside of a minibatch."""
        ahead = [rank for rank, count in self._of_owners(self._stepping) if count > self._reading]
        if ahead:
            raise RuntimeError(
                f"ranks {ahead} stepped or published while rank {self._barrier.rank} was still reading the "
                f"parameters: evaluate after this rank's own optimizer.step(), and call publish(model) on all ranks or "
                f"on none"
            )


def _by_kind(rows: Iterable[tuple[torch.Tensor, ...]]) -> list[tuple[list[torch.Tensor], ...]]:
    """Rows of tensors that belong together, as columns: one tuple of lists for each combination of dtype and device."""
    kinds: dict[tuple, list[tuple[torch.Tensor, ...]]] = {}
    for row in rows:
        if row[0].numel():
            kinds.setdefault(tuple((each.dtype, each.device) for each in row), []).append(row)
    return [tuple(map(list, zip(*kind, strict=True))) for kind in kinds.values()]


@torch.no_grad()
def copy_masters(parameters: Sequence[Sharded], streams: Streams) -> None:
    """Makes all masters readable: casts if the copy to read has another dtype, nothing if it is the master itself."""
    for compute, masters in _by_kind(chain.from_iterable(parameter.to_publish() for parameter in parameters)):
        streams.compute(partial(torch._foreach_copy_, compute, masters))


class Zeros:
    """Gradients that the user has zeroed in place: torch keeps them where a parameter is not used, instead of None, and
    the optimizer's momentum goes on. As of an entry, before gradients are cleared.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[Sharded]) -> None:
        found = {
            place: [each.grad.to_local().any() for each in parameter.optimized if each.grad is not None]
            for place, parameter in enumerate(parameters)
            if parameter.landing.has_gradient
        }
        used = torch.stack([torch.stack(each).any() for each in found.values()]).tolist() if found else []
        self._zeroed = {place: not any_used for place, any_used in zip(found, used, strict=True)}

    def kept(self, parameters: Sequence[Sharded]) -> list[int]:
        """At the exit, while `p.grad` is pending: places of the parameters whose gradient is zero on this rank if no
        rank has added to it. Not those whose gradient was set to None in the minibatch.
        """
        places = []
        for place, zeroed in self._zeroed.items():
            pending = [each.grad for each in parameters[place].optimized if each.requires_grad]
            if all(isinstance(each, PendingGradient) and (zeroed or each.zeroed) for each in pending):
                places.append(place)
            for each in pending:
                if isinstance(each, PendingGradient):
                    each.zeroed = False
        return places


@torch.no_grad()
def clear_gradients(parameters: Sequence[Sharded], streams: Streams) -> None:
    """Zeroes this rank's gradient shards for the next minibatch."""
    for (shards,) in _by_kind((shard,) for p in parameters if (shard := p.to_clear()) is not None):
        streams.compute(partial(torch._foreach_zero_, shards))


@torch.no_grad()
def land_gradients(parameters: Sequence[Sharded], divisor: float, replicas: Replicas, streams: Streams) -> None:
    """Hands the optimizer the landed gradients: summed over the replicas, divided by `divisor`, in their masters'
    dtypes.
    """
    sums = [parameter.landing.own_sum() for parameter in parameters]
    if replicas.count > 1:
        replicas.sum_parts([p.storage.gradient_parts() for p in parameters if p.is_split])
        replicas.sum_whole([own for p, own in zip(parameters, sums, strict=True) if not p.is_split])
    gradients = [p.landing.own_gradient(own) for p, own in zip(parameters, sums, strict=True)]
    if divisor != 1:
        for (own,) in _by_kind((gradient,) for gradient in gradients):
            streams.compute(partial(torch._foreach_div_, own, divisor))
    casts = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient.dtype != parameter.landing.dtype:
            cast = torch.empty_like(gradient, dtype=parameter.landing.dtype)
            casts.append((cast, gradient))
            gradient = cast
        parameter.landing.land(gradient)
    for cast, own in _by_kind(casts):
        streams.compute(partial(torch._foreach_copy_, cast, own))
