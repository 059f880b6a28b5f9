"""One parameter between its owners: the master to step, the copy to read, the gradient to add to."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor, Replicate

from odc_kernels.peers import PeerShards
from odc_kernels.staged import StagedWeight, Staging

from ..comm.grid import Grid
from ..comm.layout import ParameterSpec, Region, shard_rows
from ..comm.memory.heap import SymmetricHeap
from ..nn.choice import TABLE, Entry
from ..nn.operand import AddRows, handle_of, resolve
from .gathered import GatheredParameters
from .gradients import Accumulator, PendingGradient, Target, Waits


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether something waits for this parameter's gradient in a backward: user hooks, optimizer-in-backward."""
    return bool(
        parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
        or getattr(parameter, "_in_backward_optimizers", None)  # of torch.distributed.optim
    )


class Listener(Protocol):
    """Who is told of gradients that reach a sharded parameter: its engine."""

    def gradient_comes(self, parameter: ShardedParameter) -> None:
        """A backward has made some of its gradient. Raises where there may be none now."""

    def waited(self, parameter: ShardedParameter, waits: Waits) -> None:
        """Adding it had to wait for other ranks at these times."""


def sharded_parameter(weight: torch.Tensor) -> ShardedParameter | None:
    """What is behind a weight as a module's forward sees it; None if it is not sharded."""
    handle = getattr(weight, "_odc_handle", None)
    return None if handle is None else resolve(handle)


class ShardedParameter:
    """What operators see of it is `OnOwners`. Three views of one parameter of shape [N, ...]:

    - `sharded`: nn.Parameter over a DTensor, Shard(0) (a scalar: Replicate). What optimizers and checkpoints see.
      Its local tensor is this rank's master shard, which is also its compute shard where the dtypes agree; with
      replicas, its part of that.
    - `leaf`: nn.Parameter over the whole compute tensor: a view of the heap, or gathered for as long as it is needed.
      What modules compute with.
    - the gradient region [N, ...] in the heap, to which every rank adds and from which each owner reads.

    `whole`: the tensor under `leaf`; `gathered`: its storage, None where it is a view of the heap. `accumulator`: how
    gradients are added.
    """

    def __init__(
        self,
        *,
        spec: ParameterSpec,
        slot: int,
        compute: Region,
        gradient: Region | None,
        heap: SymmetricHeap,
        grid: Grid,
        whole: torch.Tensor,
        gathered: GatheredParameters | None,
        accumulator: Accumulator,
        staging: Staging,
        table: tuple[Entry, ...] = TABLE,
    ) -> None:
        self.spec, self.slot = spec, slot
        self.name = spec.name
        self._heap = heap  # on a GPU, tensors of peers' memory don't keep it mapped
        self._rank, self._world = heap.rank, heap.world
        self.compute_shards = [heap.shard(compute, owner) for owner in range(self._world)]
        self._compute_shard = self.compute_shards[self._rank]
        self._grid = grid
        own = self._part_of(self._compute_shard)
        if spec.has_own_master:
            shape = () if spec.is_scalar else own.shape
            master = torch.empty(shape, dtype=getattr(torch, spec.master_dtype), device=heap.device)
        else:
            master = own
        self.master = master
        trains = gradient is not None
        self.sharded = nn.Parameter(self._as_dtensor(master), requires_grad=trains)
        self._outer_storage = self.sharded.untyped_storage()  # of the DTensor's shell: empty, but `.data = …` swaps it
        self.leaf = nn.Parameter(whole, requires_grad=trains)
        self.leaf._odc_handle = handle_of(self)
        self.table = table
        self.gathered = gathered
        self.leaf._odc_never_whole = self.is_never_whole
        self.gradient_shard: torch.Tensor | None = None
        self._accumulator = accumulator
        self.staging = staging
        if trains:
            shards = [heap.shard(gradient, owner) for owner in range(self._world)]
            self.gradient_shard = shards[0 if spec.is_scalar else self._rank]
            self._own_gradient = self._part_of(self.gradient_shard)
            rows = [shards[0].view(1)] if spec.is_scalar else shards
            self._target = Target(slot=slot, shards=rows, rank=self._rank, near=heap.near)
        self._rows = [
            (0, 1) if spec.is_scalar else shard_rows(spec.shape[0], self._world, owner) for owner in range(self._world)
        ]
        start, stop = self._rows[self._rank]
        part, end = shard_rows(stop - start, grid.replicas, grid.replica)
        # First and one-past-last row of the whole that this rank has a master of.
        self.master_rows = (0, 1) if spec.is_scalar else (start + part, start + end)
        self._accumulation: Node | None = None  # autograd's node that its gradient comes to
        self._landed: DTensor | None = None
        self._hook: Any = None
        self._listener: weakref.ref[Listener] | None = None
        self.original: weakref.ref[nn.Parameter] | None = None  # what it was before sharding
        self.touched = False  # this rank added to it in this minibatch
        self.dirty = False  # somebody added to it since it was zeroed

    @torch.no_grad()
    def hold_whole(self) -> None:
        """Gives a leaf that is never whole its memory, filled, for whoever asked to read parameters himself."""
        if self.is_never_whole:
            self.leaf.untyped_storage().resize_(self.leaf.numel() * self.leaf.element_size())
            self.leaf.data.copy_(self.read())

    def let_go(self) -> None:
        """Takes the memory of a leaf that is never whole."""
        if self.is_never_whole:
            self.leaf.untyped_storage().resize_(0)

    def _as_dtensor(self, local: torch.Tensor) -> DTensor:
        shape = torch.Size(self.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        placements = [Replicate() if self.spec.is_scalar else each for each in self._grid.placements]
        return DTensor.from_local(local, self._grid.mesh, placements, run_check=False, shape=shape, stride=stride)

    def _parts_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """An own shard's rows as the replicas have masters of them: split once more, as `torch.chunk` does."""
        replicas = self._grid.replicas
        return [shard[slice(*shard_rows(len(shard), replicas, replica))] for replica in range(replicas)]

    def _part_of(self, shard: torch.Tensor) -> torch.Tensor:
        """What this rank has masters of. Of one replica that is the shard itself."""
        if self.spec.is_scalar or self._grid.replicas == 1:
            return shard
        return self._parts_of(shard)[self._grid.replica]

    def gradient_parts(self) -> list[torch.Tensor]:
        """The own gradient shard by replica, to sum over them; not of a scalar."""
        return self._parts_of(self.gradient_shard)

    def compute_parts(self) -> list[torch.Tensor]:
        """The own shard to read by replica, of which each publishes a part; not of a scalar."""
        return self._parts_of(self._compute_shard)

    @torch.no_grad()
    def fill(self, value: torch.Tensor) -> None:
        """Writes the whole tensor [N, ...] into all owners' compute shards; the masters `adopt` it."""
        if self.spec.is_scalar:
            self.compute_shards[0].copy_(value)
            return
        for shard, (start, stop) in zip(self.compute_shards, self._rows, strict=True):
            shard.copy_(value[start:stop])

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """A copy of the whole tensor [N, ...] in the compute dtype, read from its owners as they are now."""
        if self.spec.is_scalar:
            return self.compute_shards[0].clone()
        whole = self.compute_shards[0].new_empty(self.spec.shape)
        for rows, shard in zip(whole.split([len(s) for s in self.compute_shards]), self.compute_shards, strict=True):
            rows.copy_(shard)  # torch.cat would obey autocast
        return whole

    @torch.no_grad()
    def adopt(self, first: int, values: torch.Tensor) -> None:
        """Takes what this rank owns of `values`, elements `first`, `first` + 1, … of the whole, into its master."""
        row = math.prod(self.spec.shape[1:])
        start, stop = (rows * row for rows in self.master_rows)
        low, high = max(first, start), min(first + len(values), stop)
        if low < high:
            self.master.view(-1)[low - start : high - start].copy_(values[low - first : high - first])

    def own_part(self, whole: torch.Tensor) -> DTensor:
        """The whole tensor [N, ...], of which every rank has a copy, as a DTensor split like `sharded`."""
        start, stop = self.master_rows
        return self._as_dtensor(whole if self.spec.is_scalar else whole[start:stop])

    def to_publish(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(own part to read, master) where the first is a copy of the second, to be made again after each step.

        None where they are one, and where another rank publishes: a scalar's copy is rank 0's.
        """
        if not self.spec.has_own_master or (self.spec.is_scalar and self._rank != 0):
            return None
        return self._part_of(self._compute_shard), self.master

    @property
    def is_never_whole(self) -> bool:
        """Whether `leaf` has no memory ever: only modules that read the owners by themselves may have it."""
        return self._heap.apart and self.gathered is None

    @cached_property
    def compute_peers(self) -> PeerShards:
        """The shards to read, as kernels see them; not for a scalar.

        Plain torch may read them too, where kernels could not: side by side, shards are aligned as their rows are.
        """
        return PeerShards.of(
            self.compute_shards,
            shape=self.spec.shape,
            rank=self._rank,
            aligned=self._heap.apart,
            near=self._heap.near,
        )

    def parts(self, strategy: str) -> list[torch.Tensor]:
        """As `OnOwners` says; where the heap's shards lie side by side, all but a staged copy is a view."""
        if not self._heap.apart and strategy != "staged":
            return [self.leaf.detach()]
        if strategy == "direct":
            return self.compute_shards
        # Not filled in a backward that the unit did not hear of: of an output that is no tensor, or of an inner one.
        if strategy == "staged" or self.gathered is None or not self.gathered.is_filled:
            return [self.read()]
        self.gathered.wait()
        return [self.leaf.detach()]

    @property
    def table(self) -> tuple[Entry, ...]:
        """How operators on it run. It lies on the leaf, as who compiles a layer must see it."""
        return self.leaf._odc_table

    @table.setter
    def table(self, table: tuple[Entry, ...]) -> None:
        self.leaf._odc_table = table

    @property
    def world(self) -> int:
        return self._world

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    def pull(self) -> StagedWeight:
        return self.staging.pull(self.compute_peers)

    def owners_from_own(self) -> Iterator[int]:
        for step in range(self._world):
            owner = (self._rank + step) % self._world
            if self._rows[owner][0] < self._rows[owner][1]:
                yield owner

    def first_row(self, owner: int) -> int:
        return self._rows[owner][0] if owner < self._world else self._rows[-1][1]

    def listen(self, listener: Listener) -> None:
        """Has `listener` told whenever a backward has made a gradient, and adds it to the owners.

        By weak references: the garbage collector does not see into hooks of tensors, so a cycle through one would
        keep the heap for ever.
        """
        if self._hook is not None:
            self._hook.remove()
        parameter = weakref.ref(self)
        self._listener = weakref.ref(listener)

        def landed_in_leaf(_: torch.Tensor) -> None:
            if (this := parameter()) is not None:
                gradient, this.leaf.grad = this.leaf.grad, None
                this.add_gradient(gradient)

        self._hook = self.leaf.register_post_accumulate_grad_hook(landed_in_leaf)

    def gradient_comes(self) -> None:
        """To be called before anything is added to the owners. Raises where there may be no gradient now."""
        if self._listener is not None and (listener := self._listener()) is not None:
            listener.gradient_comes(self)

    def wants_gradient(self) -> bool:
        if self.leaf._backward_hooks:
            raise RuntimeError(
                f"{self.name} has a gradient hook, and its layer adds the gradient to the owners without autograd: "
                f"change p.grad after the minibatch instead, or leave the layer out of replace_layers"
            )
        # Not in a backward: an operator was called by itself. In none of a minibatch: `open_sink` will say so.
        if torch._C._current_graph_task_id() == -1 or self._accumulation is None:
            return True
        try:
            return torch._C._will_engine_execute_node(self._accumulation)
        except RuntimeError:
            raise RuntimeError(
                f"torch.autograd.grad was asked for the gradient of {self.name}, which goes to its owners: call "
                f"backward() inside the minibatch and read .grad behind it, or leave its layer out of replace_layers"
            ) from None

    def open_sink(self) -> PeerShards | AddRows:
        self._touch()
        return self._accumulator.sink(self._target, name=self.name, waited=self._report)

    def _touch(self) -> None:
        self.gradient_comes()
        self.touched = True
        self.expect_gradient()  # again, as zero_grad() inside a minibatch sets p.grad to None

    def expect_gradient(self) -> None:
        """Inside a minibatch: whoever uses `p.grad` too early is told so."""
        if self.sharded.grad is None and self.sharded.requires_grad:
            self.sharded.grad = self._pending

    @cached_property
    def _pending(self) -> PendingGradient:
        return PendingGradient(self.sharded)

    def _report(self, waits: Waits) -> None:
        if waits and self._listener is not None and (listener := self._listener()) is not None:
            listener.waited(self, waits)

    def add_gradient(self, gradient: torch.Tensor | None) -> None:
        """Adds a gradient [N, ...] to its owners' shards. None: an operator has added it, and returned None."""
        if gradient is None:
            self.gradient_comes()
            return
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self._touch()
        with torch.no_grad():
            rows = gradient.view(1) if self.spec.is_scalar else gradient
            self._accumulator.add(rows, self._target, name=self.name, waited=self._report)

    @property
    def trains(self) -> bool:
        """Whether it has a gradient, as it was said when it was sharded."""
        return self.gradient_shard is not None

    def follow_requires_grad(self) -> None:
        """Has modules make a gradient of it where the user wants one now. Raises RuntimeError where there can't be."""
        if has_gradient_hooks(self.sharded):
            raise RuntimeError(
                f"{self.name} has gradient hooks, which never fire on a sharded parameter (optimizer-in-backward "
                f"registers such hooks). Step the optimizer after the minibatch instead."
            )
        if self.sharded.requires_grad and not self.trains:
            raise RuntimeError(f"{self.name} was frozen when fully_shard was called; set requires_grad before that")
        if self.trains:
            self.leaf.requires_grad_(self.sharded.requires_grad)
            # Made in the first minibatch, as it keeps the stream that is current when it is made: torch warns of a
            # backward on another.
            if self.leaf.requires_grad and self._accumulation is None:
                self._accumulation = get_gradient_edge(self.leaf).node

    def own_gradient(self) -> torch.Tensor:
        """This rank's part of the landed gradient, to divide and to step with: in its shard, until that is cleared."""
        if self.spec.is_scalar:
            # Every rank steps its own copy of a scalar, so each needs a gradient of its own to clip and scale.
            return self.gradient_shard.clone()
        return self._own_gradient

    def land(self, gradient: torch.Tensor | None) -> None:
        """Hands the landed gradient, of the master's dtype, to the optimizer; None if no rank contributed."""
        self.touched = False
        self.dirty = self.dirty or gradient is not None
        if gradient is None or gradient is not self._own_gradient:
            self.sharded.grad = None if gradient is None else self._as_dtensor(gradient)
            return
        if self._landed is None:
            self._landed = self._as_dtensor(gradient)
        self.sharded.grad = self._landed

    def to_clear(self) -> torch.Tensor | None:
        """Drops what the optimizer was handed; returns the own gradient shard if it is to be zeroed."""
        self.sharded.grad = None
        self.leaf.grad = None
        dirty, self.touched, self.dirty = self.dirty, False, False
        return self.gradient_shard if dirty and not (self.spec.is_scalar and self._rank != 0) else None

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
