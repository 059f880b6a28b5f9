"""A parameter's memory on one rank: the copy to read, the master to step, the gradient to add to.

`Shard` is what the minibatch protocol asks of it; `HeapShard` is one of `fully_shard`, and fsdp2/ has that of a model
of torch's own. The tensors of a parameter of shape [N, ...] that the R ranks of a replica share, n = ceil(N / R) rows
each:

compute shard   [n, ...] of each owner, in the heap, in the compute dtype: what every rank reads
gradient shard  [n, ...] of each owner, in the heap, in the reduce dtype: what every rank adds to
part            this rank's rows of its shard: all of them, unless there are several replicas
master          this rank's part in the master dtype: what the optimizer steps. If the dtypes agree, it is the compute
                shard's part itself
sharded         a DTensor over the master, Shard(0): what optimizers and checkpoints see. After a minibatch
                `sharded.grad` is this rank's part of the summed gradient, before that a `PendingGradient`
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from odc_kernels.peers import PeerShards

from ..comm.grid import Grid
from ..comm.layout import ParameterSpec, Region, shard_rows
from ..comm.memory.heap import SymmetricHeap
from ..comm.replicas import Replicas
from .transport import Streams, Target

# torch's optimizers use them, and torch exports none.
_foreach_copy_, _foreach_div_, _foreach_zero_ = torch._foreach_copy_, torch._foreach_div_, torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]

# What zero_grad(set_to_none=False) calls. There is nothing to zero.
_ZEROING = (torch.Tensor.zero_, torch.Tensor.requires_grad_, torch.Tensor.detach_, _foreach_zero_)


if TYPE_CHECKING:

    class DTensorParameter(DTensor, nn.Parameter):
        """What nn.Parameter makes of a DTensor."""
else:
    DTensorParameter = nn.Parameter


def versions_of(sharded: DTensorParameter) -> tuple[int, int]:
    """They grow when it is written in place, as a DTensor and as this rank's rows."""
    return sharded._version, sharded._local_tensor._version


def share_versions(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook on a module's state dict: what is written into the rows of its DTensors, as by `dcp.load`, or into views
    of these, shows in the version counters of the parameters, whose memory they are.
    """
    for name, parameter in module.named_parameters(prefix.removesuffix("."), recurse=False, remove_duplicate=False):
        value = state.get(name)
        if value is parameter or not (isinstance(value, DTensor) and isinstance(parameter, DTensor)):
            continue
        mine, theirs = parameter._local_tensor, value._local_tensor
        if mine.data_ptr() == theirs.data_ptr() and mine.dtype == theirs.dtype:
            value._local_tensor = mine.detach()


class PendingGradient(torch.Tensor):
    """`p.grad` inside a minibatch. It has a shape, dtype and device but no memory, and raises RuntimeError when used.

    None would make `clip_grad_norm_` silently return 0 and clip nothing. `zeroed`: it was zeroed.
    """

    zeroed = False
    shard: weakref.ref[Shard]

    @staticmethod
    def __new__(cls, shard: Shard) -> PendingGradient:
        of = shard.sharded
        made = torch.Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype, device=of.device)
        made.shard = weakref.ref(shard)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata and zeroing go through; anything else raises."""
        if func in _ZEROING:
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            for each in given if func in (torch.Tensor.zero_, _foreach_zero_) else ():
                if isinstance(each, PendingGradient) and (shard := each.shard()) is not None:
                    shard.refuse_zeroed(each)
                    shard.lost, each.zeroed = False, True
            if plain := [each for each in given if not isinstance(each, PendingGradient)]:  # of another model
                func(plain)
            return args[0]
        if getattr(func, "__name__", "") == "__get__":  # an attribute; one that computes, such as .T, comes here again
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return cls._refuse()

    @staticmethod
    def _refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "p.grad inside a minibatch: the ranks' gradients are summed at its end. Clip, scale and read gradients "
            "after the `with minibatch(...)` block, before the optimizer step."
        )

    __torch_dispatch__ = full_tensor = to_local = redistribute = _refuse

    def __repr__(self) -> str:
        return "PendingGradient(there is none before the minibatch ends)"


class Shard(ABC):
    """`sharded`: what optimizers hold of it. `touched`: this rank added to its gradient in this minibatch; `dirty`:
    some rank did since it was zeroed. `stepped`: an optimizer has taken its last gradient; `lost`: none had taken one
    that was dropped, while others were stepped, and nobody has zeroed it since.
    """

    name: str
    sharded: DTensorParameter
    touched = dirty = stepped = lost = False
    zero_instead = "Call zero_grad() before the `with minibatch(...)` block, or after it"
    versions: tuple[int, int] | None = None  # as of the last weight update

    @property
    @abstractmethod
    def trains(self) -> bool:
        """True if it has a gradient shard."""

    @cached_property
    def is_everywhere(self) -> bool:
        """True if each rank has rows of its master."""
        mesh, placements = self.sharded.device_mesh.shape, self.sharded.placements
        first, end = 0, self.sharded.shape[placements[-1].dim]  # pyright: ignore[reportAttributeAccessIssue]  # of a Shard
        for ranks, placement in zip(reversed(mesh), reversed(placements), strict=True):
            if not placement.is_replicate():
                first, end = shard_rows(end - first, ranks, ranks - 1)
        return first < end

    @property
    def has_gradient(self) -> bool:
        """True if the optimizer has one to take."""
        return self.sharded.grad is not None

    def refuse_zeroed(self, gradient: torch.Tensor | None = None) -> None:
        """Raises RuntimeError if `p.grad` became None, or now becomes zeros, after this rank has added to the sum."""
        if self.touched and self.sharded.grad is gradient and self.sharded.requires_grad:
            raise RuntimeError(
                f"the gradient of {self.name} was zeroed inside the minibatch, after a backward: what was added to "
                f"the ranks' sum stays in it. {self.zero_instead}"
            )

    @abstractmethod
    def to_publish(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(part of this rank's compute shard, master) of what must be copied to be readable. Raises RuntimeError if
        something replaced its memory.
        """

    def is_edited(self) -> bool:
        """True if readers don't see what was written since it was published: values are compared on this rank, and only
        if version counters show a write. Raises as `to_publish`.
        """
        now = versions_of(self.sharded)
        if now != self.versions:
            if not self.is_as_published():
                return True
            self.versions = now
        return False

    def is_as_published(self) -> bool:
        """True if readers see what this rank's master has: values are compared."""
        pairs = [(compute, master.to(compute.dtype)) for compute, master in self.to_publish()]
        return all(torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in pairs)

    @abstractmethod
    def compute_parts(self) -> list[torch.Tensor]:
        """This rank's compute shard by replica, each of which publishes its part. One if all publish all of it."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """A copy of the whole tensor in the compute dtype, read from its owners as they are now."""

    @abstractmethod
    def clear(self) -> torch.Tensor | None:
        """Drops `p.grad` before a minibatch; returns this rank's gradient shard if it must be zeroed."""

    @abstractmethod
    def expect_gradient(self) -> None:
        """Inside a minibatch: using `p.grad` raises."""

    @abstractmethod
    def expect_no_more(self) -> bool:
        """The minibatch ends. Returns whether `p.grad` was assigned inside it; that value is dropped."""

    @abstractmethod
    def gradient_parts(self) -> list[torch.Tensor]:
        """This rank's gradient shard by replica, each of which steps its part. One if all step all of it."""

    @abstractmethod
    def own_gradient(self) -> torch.Tensor:
        """This rank's part of the sum, in floating point, once it is summed over replicas. Part of its memory."""

    @property
    @abstractmethod
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of the gradient that the optimizer gets."""

    def assign(self, gradient: torch.Tensor | None) -> None:
        """Gives the optimizer the reduced gradient; None if no rank contributed."""
        self.touched = self.stepped = False
        self.dirty = self.dirty or gradient is not None
        self._assign(gradient)

    @abstractmethod
    def _assign(self, gradient: torch.Tensor | None) -> None: ...

    def drop(self) -> None:
        """The minibatch failed: there is no gradient, and what some rank may have added is zeroed next."""
        self.sharded.grad = None
        self.dirty = True


class HeapShard(Shard):
    """`rows`: (first, end) of each owner's. `master_rows`: those of the whole tensor that this rank has a master of."""

    def __init__(
        self,
        *,
        spec: ParameterSpec,
        number: int,
        compute: Region,
        gradient: Region | None,
        heap: SymmetricHeap,
        grid: Grid,
        target: type[Target] = Target,
    ) -> None:
        """`target`: the kind of its gradient shards."""
        self.spec, self.name = spec, spec.name
        self.heap, self._grid, self.region = heap, grid, compute
        self.sums: dict[tuple, int] = {}  # of its values, by what was asked, for models that borrow it
        self._rank, self.world, self._near = heap.rank, heap.world, heap.near
        self.compute_shards = [heap.shard(compute, owner) for owner in range(self.world)]
        own = self.part_of(self.compute_shards[self._rank])
        if spec.has_own_master:
            self.master = torch.empty(own.shape, dtype=getattr(torch, spec.master_dtype), device=heap.device)
        else:
            self.master = own
        self._copied = [(own, self.master)] if spec.has_own_master else []
        self.gradient_shard: torch.Tensor | None = None
        if gradient is not None:
            shards = [heap.shard(gradient, owner) for owner in range(self.world)]
            self.gradient_shard = shards[self._rank]
            self.gradient_part = self.part_of(self.gradient_shard)
            self.target = target(number=number, shards=shards, rank=self._rank, near=heap.near)
        self.rows = [shard_rows(spec.shape[0], self.world, owner) for owner in range(self.world)]
        start, stop = self.rows[self._rank]
        part, end = shard_rows(stop - start, grid.replicas, grid.replica)
        self.master_rows = start + part, start + end
        dtensor = self.as_dtensor(self.master)
        self.sharded = cast("DTensorParameter", nn.Parameter(dtensor, requires_grad=self.trains))
        self._outer_storage = self.sharded.untyped_storage()  # of the DTensor's shell: empty, but `.data = …` swaps it
        self._memory = self.master.data_ptr(), self.master.dtype, self._outer_storage._cdata
        self._reduced: DTensor | None = None

    @property
    def trains(self) -> bool:
        """As decided when it was sharded."""
        return self.gradient_shard is not None

    @property
    def saved_dtype(self) -> str:
        """The dtype of what checkpoints have of it."""
        return self.spec.master_dtype

    def values_of(self, part: int, parts: int) -> tuple[int, torch.Tensor]:
        """(number of the first one, values as checkpoints have them) of this rank, number `part` of `parts` that have
        them all between them."""
        return self.master_rows[0] * math.prod(self.spec.shape[1:]), self.master

    def as_dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's part of a tensor [N, ...], as a DTensor split like `sharded`."""
        shape = torch.Size(self.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            local, self._grid.mesh, self._grid.placements, run_check=False, shape=shape, stride=stride
        )
        # Its spec is one object for all that are alike, which torch's dispatch compares faster.
        return cast("DTensor", made.detach())

    def parts_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Splits a shard of this rank by replica, as `torch.chunk` does: each has the master of its part."""
        replicas = self._grid.replicas
        if replicas == 1:
            return [shard]
        return [shard[slice(*shard_rows(len(shard), replicas, replica))] for replica in range(replicas)]

    def parts_of_all(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, compute shard) of what each rank has the master of, in order."""
        for (row, _), shard in zip(self.rows, self.compute_shards, strict=True):
            for part in self.parts_of(shard):
                yield row, part
                row += len(part)

    def part_of(self, shard: torch.Tensor) -> torch.Tensor:
        """The rows that this rank has masters of."""
        return self.parts_of(shard)[self._grid.replica]

    @torch.no_grad()
    def adopt(self, whole: torch.Tensor) -> None:
        """Copies this rank's rows of the whole tensor [N, ...] into its master, to be published."""
        self.master.copy_(whole.reshape(self.spec.shape)[slice(*self.master_rows)])

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        whole = self.compute_shards[0].new_empty(self.spec.shape)
        for rows, shard in zip(whole.split([len(s) for s in self.compute_shards]), self.compute_shards, strict=True):
            rows.copy_(shard)  # torch.cat would obey autocast
        return whole.view(self.spec.whole_shape)

    def own_part(self, whole: torch.Tensor) -> DTensor:
        """The whole tensor [N, ...], of which every rank has a copy, as a DTensor split like `sharded`."""
        start, stop = self.master_rows
        return self.as_dtensor(whole.reshape(self.spec.shape)[start:stop])

    @cached_property
    def compute_peers(self) -> PeerShards:
        """The shards to read, as kernels see them.

        Plain torch may read them even where kernels could not: shards side by side are only as aligned as their rows.
        """
        return PeerShards.of(
            self.compute_shards,
            shape=self.spec.shape,
            rank=self._rank,
            aligned=self.heap.apart,
            near=self._near,
        )

    def _check_memory(self) -> None:
        """Something replaces it as `.double()` does."""
        local = self.sharded._local_tensor
        if (local.data_ptr(), local.dtype, self.sharded.untyped_storage()._cdata) != self._memory:
            raise RuntimeError(
                f"{self.name} is no longer in the shared heap: something replaced its storage "
                f"(.data = …, .to(dtype) on a submodule, assign=True). Write into it with copy_() instead."
            )

    def to_publish(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Empty if the compute shard and the master are the same memory."""
        self._check_memory()
        return self._copied

    def is_as_published(self) -> bool:
        """As others; False where other replicas have a copy that this rank does not see."""
        return (bool(self._copied) or self._grid.replicas == 1) and super().is_as_published()

    def compute_parts(self) -> list[torch.Tensor]:
        return self.parts_of(self.compute_shards[self._rank])

    def clear(self) -> torch.Tensor | None:
        self.sharded.grad = None
        dirty, self.touched, self.dirty = self.dirty, False, False
        return self.gradient_shard if dirty else None

    @cached_property
    def _pending(self) -> PendingGradient:
        return PendingGradient(self)

    def expect_gradient(self) -> None:
        if self.sharded.grad is None and self.sharded.requires_grad:
            self.refuse_zeroed()
            self.lost = False
            self.sharded.grad = self._pending

    def expect_no_more(self) -> bool:
        given, self.sharded.grad = self.sharded.grad, None
        self.lost = self.lost and given is not None
        return given is not None and given is not self._pending

    def gradient_parts(self) -> list[torch.Tensor]:
        return self.parts_of(self.target.shards[self._rank])

    def own_gradient(self) -> torch.Tensor:
        self._own_gradient = self.target.value(self.gradient_part)
        return self._own_gradient

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.master.dtype

    def _assign(self, gradient: torch.Tensor | None) -> None:
        if gradient is None or gradient is not self._own_gradient:
            self.sharded.grad = None if gradient is None else self.as_dtensor(gradient)
            return
        if self._reduced is None:
            self._reduced = self.as_dtensor(gradient)
        self.sharded.grad = self._reduced


#
# One launch per dtype, not per parameter, by torch's multi-tensor operators (`torch._foreach_*`), as in optimizers. On
# CUDA one launch takes as many tensors as an argument list holds if all tensors of a list have one device and dtype and
# each pair has one shape and stride; otherwise, and on the CPU, they go tensor by tensor with the same result.


def _by_kind(rows: Iterable[tuple[torch.Tensor, ...]]) -> list[tuple[list[torch.Tensor], ...]]:
    """Rows of tensors that belong together, as columns: one tuple of lists for each combination of dtype and device."""
    kinds: dict[tuple, list[tuple[torch.Tensor, ...]]] = {}
    for row in rows:
        if row[0].numel():
            kinds.setdefault(tuple((each.dtype, each.device) for each in row), []).append(row)
    return [tuple(map(list, zip(*kind, strict=True))) for kind in kinds.values()]


@torch.no_grad()
def copy_masters(shards: Sequence[Shard], streams: Streams) -> None:
    """Makes all masters readable: casts if the compute shard has another dtype, nothing if it is the master itself."""
    for compute, masters in _by_kind(chain.from_iterable(shard.to_publish() for shard in shards)):
        streams.compute(partial(_foreach_copy_, compute, masters))
    for shard in shards:
        shard.versions = versions_of(shard.sharded)


@torch.no_grad()
def refuse_edited(shards: Sequence[Shard]) -> None:
    """Raises RuntimeError if one was edited since it was published. Without an edit it compares a few integers."""
    for shard in shards:
        if shard.is_edited():
            raise RuntimeError(
                f"{shard.name} was edited since it was published, and other ranks would read its former values: call "
                f"publish(model) on all ranks, outside of minibatches"
            )


@torch.no_grad()
def clear_gradients(shards: Sequence[Shard], streams: Streams) -> None:
    """Zeroes this rank's gradient shards for the next minibatch."""
    for (gradients,) in _by_kind((gradient,) for each in shards if (gradient := each.clear()) is not None):
        streams.compute(partial(_foreach_zero_, gradients))


@torch.no_grad()
def reduce_gradients(shards: Sequence[Shard], divisor: float, replicas: Replicas, streams: Streams) -> None:
    """Gives the optimizer its gradients: summed over the replicas, divided by `divisor`, in their masters' dtypes."""
    if replicas.count > 1:
        replicas.sum([shard.gradient_parts() for shard in shards])
    gradients = [shard.own_gradient() for shard in shards]
    if divisor != 1:
        for (own,) in _by_kind((gradient,) for gradient in gradients):
            streams.compute(partial(_foreach_div_, own, divisor))
    casts = []
    for shard, gradient in zip(shards, gradients, strict=True):
        if gradient.dtype != shard.gradient_dtype:
            cast = torch.empty_like(gradient, dtype=shard.gradient_dtype)
            casts.append((cast, gradient))
            gradient = cast
        shard.assign(gradient)
    for cast, own in _by_kind(casts):
        streams.compute(partial(_foreach_copy_, cast, own))


class Zeros:
    """Gradients that the user has zeroed in place: torch keeps them where a parameter is not used, instead of None, and
    the optimizer's momentum continues. As of an entry, before gradients are cleared.
    """

    @torch.no_grad()
    def __init__(self, shards: Sequence[Shard]) -> None:
        gradients = {place: g for place, each in enumerate(shards) if isinstance(g := each.sharded.grad, DTensor)}
        used = torch.stack([g.to_local().any() for g in gradients.values()]).tolist() if gradients else []
        self._zeroed = {place: not any_used for place, any_used in zip(gradients, used, strict=True)}

    def lost(self, shards: Sequence[Shard]) -> set[Shard]:
        """Those whose gradient goes although no optimizer has taken it."""
        kept = [shards[place] for place, zeroed in self._zeroed.items() if not zeroed]
        return {shard for shard in kept if shard.lost or not shard.stepped}

    def kept(self, shards: Sequence[Shard]) -> list[int]:
        """At the exit, while `p.grad` is pending: places of the shards whose gradient is zero on this rank if no rank
        has added to it. Not those whose gradient was set to None in the minibatch.
        """
        places = []
        for place, zeroed in self._zeroed.items():
            sharded = shards[place].sharded
            pending = sharded.grad if isinstance(sharded.grad, PendingGradient) else None
            if not sharded.requires_grad or (pending is not None and (zeroed or pending.zeroed)):
                places.append(place)
            if pending is not None:
                pending.zeroed = False
        return places
