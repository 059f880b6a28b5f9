"""A unit of torch's `fully_shard` whose shards are in the heap: what it gathers from, and where its gradients go.

compute shards    [bytes] of each owner: its flat shard in the dtypes that modules compute in, copied from the masters
gradient shards   [elements] of each owner: the flat shard of what trains, in the reduce dtype
masters           FSDP2's own sharded parameters, which optimizers step
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ..comm.layout import Region
from ..comm.memory.heap import SymmetricHeap
from ..engine.shard import DTensorParameter, PendingGradient, Shard, refuse_edited
from ..engine.transport import Target, Transport
from ..engine.unit import Passes
from .found import FsdpParameter, FsdpUnit


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that keeps nothing alive: the garbage collector does not see what torch's hooks and tensors hold."""
    weak = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        if (call := weak()) is not None:
            call(*args)

    return hook


class BridgedParameter(Shard):
    """A parameter whose master FSDP2 has; each replica has all of them. `tied_to`: one that has the same sharded
    parameter, and whose `p.grad` is the sum of both.
    """

    def __init__(
        self, found: FsdpParameter, compute: Sequence[torch.Tensor], gradient: torch.Tensor | None, rank: int
    ) -> None:
        """`compute`: its part of each owner's compute shard; `gradient`: of this rank's gradient shard, None if it is
        frozen.
        """
        self.found, self.name, self._compute, self.gradient, self._rank = found, found.name, compute, gradient, rank
        self.tied_to: BridgedParameter | None = None
        self.pending: Any = PendingGradient(self)
        self.whole: nn.Parameter | None = None  # what modules see while the unit is whole
        self.is_shared = False  # others are tied to it
        self.has_come = False  # a gradient, on this rank, that FSDP2 has not reduced
        self._bound: nn.Parameter | None = None  # the sharded parameter with our hook
        self._hook: RemovableHandle | None = None
        self._user_hooks: dict[int, Callable] = {}  # during a minibatch
        self._has_way = self._shows_zeros = False
        self._sum: TensorWeakRef | None = None  # the rows that `p.grad` got, in `gradient`'s memory

    @property
    def trains(self) -> bool:
        return self.gradient is not None

    @property
    def sharded(self) -> DTensorParameter:
        return self.found.sharded

    def bind(self, tied_to: BridgedParameter | None) -> None:
        """Takes the gradients of the sharded parameter as it is now; `tied_to` does it if it has the same one."""
        self.tied_to, self.is_shared = tied_to, False
        if tied_to is not None:
            tied_to.is_shared = True
        if self._hook is not None and (tied_to is not None or self._bound is not self.sharded):
            self._hook.remove()
            self._bound = self._hook = None
        if self._hook is None and tied_to is None and self.trains:
            self._bound = self.sharded
            self._hook = self.sharded.register_post_accumulate_grad_hook(weakly(self._take))
            self.pending = PendingGradient(self)

    def comes(self, whole: nn.Parameter) -> None:
        """The whole parameter has got a gradient."""
        self.has_come = True

    @torch.no_grad()
    def _take(self, sharded: DTensorParameter) -> None:
        """FSDP2 has set `p.grad`: to zeros, or where one rank has the whole unit, to the gradient."""
        gradient, sharded.grad = sharded.grad, None
        if len(self._compute) == 1 and isinstance(gradient, DTensor):
            self.own_gradient().add_(gradient.to_local().reshape(-1))
            self.touch()
        if not self.is_shared:  # FSDP2 may set p.grad again at once, in the same unit
            self.show_pending()

    def follow_requires_grad(self) -> None:
        """Raises RuntimeError for what changed since `use_odc`."""
        if self.sharded.requires_grad != self.trains:
            now = "unfrozen" if self.sharded.requires_grad else "frozen"
            raise RuntimeError(f"{self.name} was {now} after use_odc: choose what trains before it")

    def clear(self) -> torch.Tensor | None:
        dirty, self.touched, self.dirty = self.dirty, False, False
        self.make_way()
        if self._sum is not None and (rows := self._sum()) is not None:  # kept by the program, over zero_grad()
            rows.data = rows.clone()
        self._sum = None
        return self.gradient if dirty else None

    def compute_parts(self) -> list[torch.Tensor]:
        return [self._compute[self._rank]]

    def to_publish(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        own = self._compute[self._rank]
        for local, dtype in self.found.gathered():
            into, own = own.tensor_split([local.numel() * dtype.itemsize])
            if into.storage_offset() % dtype.itemsize == 0:
                yield into.view(dtype), local
            else:  # a unit of several dtypes, which FSDP2 gathers as bytes
                yield into, local.to(dtype).view(torch.uint8)

    def read(self) -> torch.Tensor:
        if self.found.is_converted:
            raise NotImplementedError(
                f"{self.name} has fsdp_pre_all_gather: only FSDP2 knows how to make it whole, as by full_tensor()"
            )
        dtype = self.found.compute_dtype  # a clone of a part is aligned to it
        return self.found.joined([part.clone().view(dtype) for part in self._compute])

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.sharded.dtype

    @property
    def _users_hooks(self) -> list[int]:
        hooks = self.sharded._post_accumulate_grad_hooks or {}
        return [key for key in hooks if key != getattr(self._hook, "id", None)]

    @property
    def has_hooks(self) -> bool:
        """The user has hooks that wait for its gradient."""
        return self.tied_to is None and bool(self._users_hooks)

    def expect_gradient(self) -> None:
        """A minibatch begins: using `p.grad` raises, and hooks wait for the gradient of all ranks."""
        if self.tied_to is None:
            self._user_hooks = {key: self.sharded._post_accumulate_grad_hooks.pop(key) for key in self._users_hooks}
        self.show_pending()

    def show_pending(self) -> None:
        self._has_way = False
        if self.sharded.grad is None:
            self.sharded.grad = (self.tied_to or self).pending

    def touch(self) -> None:
        """This rank has added to its gradient."""
        self.touched = True
        if self.tied_to is not None:
            self.tied_to.touched = True

    def refuse_zeroed(self, gradient: torch.Tensor | None = None) -> None:
        if not (self._has_way or self.is_shared or self.tied_to):  # else p.grad is None without zero_grad()
            super().refuse_zeroed(gradient)

    def make_way(self) -> None:
        """FSDP2 is about to set `p.grad`, and would add to what is there."""
        owner = self.tied_to or self
        if self.sharded.grad is None and not (self._has_way or owner.touched):  # by zero_grad()
            owner.lost = False
        self._has_way, self.sharded.grad = True, None

    def expect_no_more(self) -> bool:
        """The minibatch ends. Returns whether `p.grad` was assigned inside it."""
        if self.tied_to is None:
            self.sharded._post_accumulate_grad_hooks.update(self._user_hooks)
        given = self.sharded.grad
        self.make_way()
        return not isinstance(given, PendingGradient | None)

    def drop(self) -> None:
        self.make_way()
        self.dirty = True

    def gradient_parts(self) -> list[torch.Tensor]:
        return [self.own_gradient()]

    def own_gradient(self) -> torch.Tensor:
        if self.gradient is None:
            raise RuntimeError(f"{self.name} is frozen: it has no gradient")
        return self.gradient

    def _assign(self, gradient: torch.Tensor | None) -> None:
        """A flat gradient; None if no rank contributed."""
        if self.tied_to is not None:
            return
        self.sharded.grad = self._sum = None
        if gradient is not None:
            self.sharded.grad = summed = self.found.as_dtensor(gradient)
            self._sum = TensorWeakRef(summed._local_tensor)  # of `summed` itself it would stop `model.to`

    @property
    def was_summed(self) -> bool:
        """`p.grad` got the ranks' sum since the last minibatch began."""
        return self._sum is not None

    def show_zeros(self) -> None:
        """If no rank has a gradient, `p.grad` is zeros until `drop_zeros`. The program may write into them."""
        if self.sharded.grad is None:
            self.dirty = self._shows_zeros = True
            self.sharded.grad = self.found.as_dtensor(self.own_gradient().to(self.gradient_dtype))

    def drop_zeros(self) -> None:
        """They become None, as FSDP2 has it, before anything but the program sees them, also what the program has put
        in their place: `p.grad = p.grad / 2`.
        """
        if self._shows_zeros and not isinstance(self.sharded.grad, PendingGradient):
            self.sharded.grad = None
        self._shows_zeros = False

    def run_hooks(self) -> None:
        """Runs the user's hooks on the reduced gradient."""
        if self.was_summed:
            for hook in self._user_hooks.values():
                hook(self.sharded)
        self._user_hooks = {}


class BridgedUnit:
    """A unit of FSDP2, gathered and reduced as one: by reads of the owners' memory, and additions to it. `undivided`:
    FSDP2's divide factor, the object, which the user's 1.0 is not.
    """

    undivided = float("1")

    def __init__(
        self,
        found: FsdpUnit,
        *,
        number: int,
        compute: Region,
        gradient: Region | None,
        heap: SymmetricHeap,
        transport: Transport,
        passes: Passes,
        zeros: ReducedZeros,
    ) -> None:
        self.found, self.name, self._heap, self._transport = found, found.name, heap, transport
        self._passes, self._engine = passes, passes.protocol
        self._compute_shards = [heap.shard(compute, owner) for owner in range(heap.world)]
        if gradient is not None:
            shards = [heap.shard(gradient, owner) for owner in range(heap.world)]
            self._target = Target(number=number, shards=shards, rank=heap.rank, near=heap.near)
        sizes = [each.gathered_bytes for each in found.parameters]
        parts = zip(*(shard.split(sizes) for shard in self._compute_shards), strict=True)
        trained = set(map(id, found.trained))
        gradients = iter(shards[heap.rank].split([each.padded for each in found.trained]) if trained else ())
        self.parameters = [
            BridgedParameter(each, part, next(gradients) if id(each) in trained else None, heap.rank)
            for each, part in zip(found.parameters, parts, strict=True)
        ]
        self.trained = [each for each in self.parameters if each.trains]
        self.gather, self.reduce = _Gather(self), _Reduce(self, zeros)

    def connect(self) -> None:
        """From now on FSDP2 communicates by this unit."""
        for module in self.found.modules:
            module.set_custom_all_gather(self.gather)  # pyright: ignore[reportArgumentType]  # by structure
            module.set_custom_reduce_scatter(self.reduce)  # pyright: ignore[reportArgumentType]
            module.set_gradient_divide_factor(self.undivided)
            if self.found.gathers_from_fewer:  # all owners' memory is as near
                module.set_reshard_after_forward(True, recurse=False)

    @property
    def world(self) -> int:
        """The ranks that split it."""
        return self._heap.world

    @property
    def is_replicated(self) -> bool:
        return self._engine.replicas.count > 1

    @torch.no_grad()
    def read(self, output: torch.Tensor, own: torch.Tensor, world: int) -> None:
        """Fills `output` with all owners' compute shards. `own`: this rank's as FSDP2 would gather it, only checked."""
        heap, engine = self._heap, self._engine
        if world != heap.world:
            raise RuntimeError(
                f"unit {self.name} is gathered from {world} ranks instead of {heap.world}: was its mesh changed after "
                f"use_odc?"
            )
        if own.nbytes != (expected := len(self._compute_shards[heap.rank])):
            raise RuntimeError(
                f"FSDP2's shard of unit {self.name} has {own.nbytes} bytes and was expected to have {expected}: were "
                f"parameters added or replaced after use_odc?"
            )
        refuse_edited(self.parameters)
        if not (engine.is_open or self._passes.in_forward):
            engine.publication.wait()  # unshard() outside of a forward
        engine.streams.computes_here()
        rows = output.view(torch.uint8).view(world, -1)
        for step in range(world):
            owner = (heap.rank + step) % world
            rows[owner].copy_(self._compute_shards[owner], non_blocking=True)

    @torch.no_grad()
    def check_layout(self) -> None:
        """Once weights are published: raises RuntimeError unless FSDP2 lays out its shard as the published one.

        Whole parameters exist from here on, and report when they get a gradient.
        """
        module = self.found.modules[0]
        module.unshard()
        for each in self.trained:
            each.whole = each.found.registered
            each.whole.register_post_accumulate_grad_hook(weakly(each.comes))
        laid_out = [each for each in self.parameters if not each.found.is_converted]
        same = [torch.equal(*(w.view(torch.uint8) for w in (each.found.registered, each.read()))) for each in laid_out]
        module.reshard()
        if not all(same):
            raise RuntimeError(
                f"torch {torch.__version__} lays out the shard of unit {self.name} in another way than use_odc knows: "
                f"use_odc knows torch 2.11 to 2.15"
            )

    def reduced(self) -> list[BridgedParameter]:
        """Those that FSDP2 reduces now: with a gradient, or, after `set_reduce_scatter_unused_params(True)`, all."""
        return [each for each in self.trained if each.has_come or self.found.reduces_unused]

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a flat gradient, all owners' shards of what is reduced one after another, to the owners."""
        if not self._engine.is_open:
            raise RuntimeError(f"backward outside of a minibatch: {self._engine.backward_belongs}")
        reduced, world = self.reduced(), self._heap.world
        sizes = [each.found.padded for each in reduced]
        if gradient.numel() != sum(sizes) * world:
            raise RuntimeError(
                f"unit {self.name} got gradients of {gradient.numel()} elements, and those of "
                f"{[each.name for each in reduced]} have {sum(sizes) * world}: were parameters replaced after use_odc?"
            )
        self._engine.streams.computes_here()
        if len(reduced) < len(self.trained):
            parts = dict(zip(reduced, gradient.view(world, -1).split(sizes, dim=1), strict=True))
            zeros = {each: gradient.new_zeros(()).expand(world, each.found.padded) for each in self.trained}
            gradient = torch.cat(list((zeros | parts).values()), dim=1).view(-1)
        name = f"unit {self.name}"
        self._transport.add(gradient, self._target, name=name, waited=partial(self._passes.waited, name))
        for each in reduced:
            each.touch()
        for each in self.trained:
            each.has_come = False

    def forget(self) -> None:
        """Drops gradients of a backward that began and did not end."""
        for each in self.trained:
            if each.whole is not None:
                each.whole.grad = None
            each.has_come = False


class ReducedZeros:
    """The reduced gradients that FSDP2 gets: the same memory for all units, as with replicas it keeps each of them."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def of(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype not in self._memory or len(self._memory[dtype]) < size:
            self._memory[dtype] = torch.zeros(size, dtype=dtype, device=device)
        return self._memory[dtype][:size]


class _Gather:
    """FSDP2's all-gather, as reads of the owners' memory."""

    def __init__(self, unit: BridgedUnit) -> None:
        self._unit = unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._unit.read(output_tensor, input_tensor, group.size())


class _Reduce:
    """FSDP2's reduce-scatter, as additions to the owners' memory; FSDP2 gets zeros."""

    def __init__(self, unit: BridgedUnit, zeros: ReducedZeros) -> None:
        self._unit, self._zeros = unit, zeros

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        unit = self._unit
        for each in unit.trained:
            each.refuse_zeroed()
            each.make_way()
        if unit.world == 1 or math.prod(size) != sum(each.found.padded for each in unit.reduced()):
            return torch.empty(*size, dtype=dtype, device=device)
        # What FSDP2 takes as reduced. With replicas it sums that over backwards, and each may reduce other parameters.
        return self._zeros.of(0 if unit.is_replicated else math.prod(size), dtype, device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        unit, reduced = self._unit, self._unit.reduced()
        unit.add(input_tensor)
        output_tensor.zero_()
        for each in unit.trained:
            if unit.is_replicated or each not in reduced:  # FSDP2 sets no p.grad
                each.show_pending()
