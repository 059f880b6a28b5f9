"""One parameter between its owners: the master to step, the copy to read, the gradient to add to."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .errors import DeadlineExceeded
from .meeting import Meetings
from .memory.heap import SymmetricHeap
from .plan import ParameterSpec, Region, shard_rows

_NAP_S = 20e-6
_LONG_WAIT_S = 1e-3  # waits for a lock that are shorter are not worth an event


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether something waits for this parameter's gradient in a backward: user hooks, optimizer-in-backward."""
    return bool(
        parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
        or getattr(parameter, "_in_backward_optimizers", None)  # of torch.distributed.optim
    )


class ShardedParameter:
    """Three views of one parameter of shape [N, ...]:

    - `sharded`: nn.Parameter over a DTensor, Shard(0) (a scalar: Replicate). What optimizers and checkpoints see.
      Its local tensor is this rank's master shard, which is also its compute shard where the dtypes agree.
    - `leaf`: nn.Parameter over the whole compute tensor in the heap. What modules compute with.
    - the gradient region [N, ...] in the heap, to which every rank adds and from which each owner reads.
    """

    def __init__(
        self,
        *,
        spec: ParameterSpec,
        slot: int,
        compute: Region,
        gradient: Region | None,
        heap: SymmetricHeap,
        mesh: DeviceMesh,
    ) -> None:
        self.spec, self.slot, self._heap = spec, slot, heap
        self.name = spec.name
        self._rank, self._world = heap.rank, heap.world
        self._compute_shard = heap.shard(compute, self._rank)
        if spec.is_scalar:
            master = torch.empty((), dtype=getattr(torch, spec.master_dtype))
        elif spec.has_own_master:
            master = torch.empty(self._compute_shard.shape, dtype=getattr(torch, spec.master_dtype))
        else:
            master = self._compute_shard
        self.master = master
        trains = gradient is not None
        self._mesh = mesh
        self.sharded = nn.Parameter(self._as_dtensor(master), requires_grad=trains)
        self._outer_storage = self.sharded.untyped_storage()  # of the DTensor's shell: empty, but `.data = …` swaps it
        self.leaf = nn.Parameter(heap.whole(compute), requires_grad=trains)
        self._gradients = [heap.shard(gradient, owner) for owner in range(self._world)] if trains else []
        self.gradient_shard = self._gradients[0 if spec.is_scalar else self._rank] if trains else None
        self._rows = [
            (0, 1) if spec.is_scalar else shard_rows(spec.shape[0], self._world, owner) for owner in range(self._world)
        ]
        self._threads = threading.Lock()  # see [Note: traps of fcntl locks]
        self._landed: DTensor | None = None
        self._listener: Any = None
        self.original: weakref.ref[nn.Parameter] | None = None  # what it was before sharding
        self.touched = False  # this rank added to it in this minibatch
        self.dirty = False  # somebody added to it since it was zeroed

    def _as_dtensor(self, local: torch.Tensor) -> DTensor:
        shape = torch.Size(self.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        placement = Replicate() if self.spec.is_scalar else Shard(0)
        return DTensor.from_local(local, self._mesh, [placement], run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def fill(self, value: torch.Tensor) -> None:
        """Writes the whole tensor [N, ...] into all owners' compute shards; the masters `adopt` it."""
        self.leaf.copy_(value)

    @torch.no_grad()
    def adopt(self, first: int, values: torch.Tensor) -> None:
        """Takes what this rank owns of `values`, elements `first`, `first` + 1, … of the whole, into its master."""
        row = math.prod(self.spec.shape[1:])
        start, stop = (rows * row for rows in self._rows[self._rank])
        low, high = max(first, start), min(first + len(values), stop)
        if low < high:
            self.master.view(-1)[low - start : high - start].copy_(values[low - first : high - first])

    def own_part(self, whole: torch.Tensor) -> DTensor:
        """The whole tensor [N, ...], of which every rank has a copy, as a DTensor split like `sharded`."""
        start, stop = self._rows[self._rank]
        return self._as_dtensor(whole if self.spec.is_scalar else whole[start:stop])

    @torch.no_grad()
    def publish(self) -> None:
        """Makes the master readable: a cast where it is a copy of its own, else nothing, as it is what peers read."""
        if self.spec.has_own_master and not (self.spec.is_scalar and self._rank != 0):
            self._compute_shard.copy_(self.master)

    def listen(self, push: Callable[[ShardedParameter], None]) -> None:
        """Has `push(self)` called whenever a backward has made a whole gradient, in `leaf.grad`.

        By weak references: the garbage collector does not see into hooks of tensors, so a cycle through one would
        keep the heap for ever.
        """
        if self._listener is not None:
            self._listener.remove()
        parameter, method = weakref.ref(self), weakref.WeakMethod(push)

        def landed_in_leaf(_: torch.Tensor) -> None:
            if (this := parameter()) is not None and (push := method()) is not None:
                push(this)

        self._listener = self.leaf.register_post_accumulate_grad_hook(landed_in_leaf)

    @torch.no_grad()
    def add_gradient(self, meetings: Meetings) -> list[tuple[float, float]]:
        """Moves `leaf.grad` [N, ...] into its owners' shards, own shard first.

        Each (parameter, owner) has a lock; one that is taken is left for later, so that ranks that come at the same
        time work on different owners. Returns the times, as (start_s, end_s), at which all that was left was taken.
        Raises DeadlineExceeded with the holder's name.
        """
        gradient, self.leaf.grad = self.leaf.grad, None
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        waits: list[tuple[float, float]] = []
        with self._threads:
            self.touched = True
            pending = [(self._rank + step) % self._world for step in range(self._world)]
            pending = [owner for owner in pending if self._gradients[owner].numel()]
            stuck_s: float | None = None
            while pending:
                before_s = time.monotonic()
                left = [owner for owner in pending if not self._try_add(gradient, owner)]
                if len(left) < len(pending):
                    if stuck_s is not None and before_s - stuck_s > _LONG_WAIT_S:
                        waits.append((stuck_s, before_s))
                    stuck_s = None
                else:
                    stuck_s = before_s if stuck_s is None else stuck_s
                    self._give_up_if_late(before_s - stuck_s, left[0], meetings.timeout_s)
                    time.sleep(_NAP_S)
                pending = left
        return waits

    def _give_up_if_late(self, waited_s: float, owner: int, timeout_s: float) -> None:
        if waited_s > timeout_s:
            holder = self._heap.lock_holder(self.slot, owner)
            raise DeadlineExceeded(
                [] if holder is None else [holder],
                f"rank {self._rank} waited {waited_s:.1f} s to add its gradient of {self.name} to the shard of rank "
                f"{owner}: its lock is held by {'another process' if holder is None else f'rank {holder}'}",
            )

    def _try_add(self, gradient: torch.Tensor, owner: int) -> bool:
        if not self._heap.try_lock(self.slot, owner):
            return False
        try:
            if self.spec.is_scalar:
                self._gradients[owner].add_(gradient)
            else:
                start, stop = self._rows[owner]
                self._gradients[owner].add_(gradient[start:stop])
        finally:
            self._heap.unlock(self.slot, owner)
        return True

    @torch.no_grad()
    def land(self, *, touched_by_any: bool, divide_factor: float) -> None:
        """Hands the landed gradient to the optimizer: `sharded.grad`, or None if no rank contributed."""
        self.touched = False
        if not touched_by_any:
            self.sharded.grad = None
            return
        self.dirty = True
        gradient = self.gradient_shard
        if self.spec.is_scalar:
            # Every rank steps its own copy of a scalar, so each needs a gradient of its own to clip and scale.
            gradient = gradient.to(self.master.dtype, copy=True)
            gradient.div_(divide_factor)
        elif divide_factor != 1:
            gradient.div_(divide_factor)
        if gradient.dtype != self.master.dtype:
            gradient = gradient.to(self.master.dtype)
        if gradient is not self.gradient_shard:
            self.sharded.grad = self._as_dtensor(gradient)
            return
        if self._landed is None:
            self._landed = self._as_dtensor(gradient)
        self.sharded.grad = self._landed

    @torch.no_grad()
    def clear_gradient(self) -> None:
        """Zeroes the own gradient shard for the next minibatch."""
        self.sharded.grad = None
        self.leaf.grad = None
        if self.dirty and not (self.spec.is_scalar and self._rank != 0):
            self.gradient_shard.zero_()
        self.touched = self.dirty = False

    def check_memory(self) -> None:
        """Raises when something replaced the memory under the parameter, as `.data = …` or `.double()` do."""
        local = self.sharded._local_tensor
        if (
            local.data_ptr() != self.master.data_ptr()
            or local.dtype != self.master.dtype
            or self.sharded.untyped_storage()._cdata != self._outer_storage._cdata
        ):
            raise RuntimeError(
                f"{self.name} no longer lies in the shared heap: something replaced its storage "
                f"(.data = …, .to(dtype) on a submodule, assign=True). Write into it with copy_() instead."
            )
