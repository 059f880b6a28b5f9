"""A unit of torch's `fully_shard` whose shards are in the heap: what it gathers from, and where its gradients go.

compute shards    [bytes] of each owner: its flat shard in the dtypes that modules compute in, copied from the masters
gradient shards   [elements] of each owner: the flat shard of what trains, in the reduce dtype
masters           FSDP2's own sharded parameters, which optimizers step
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..comm.layout import Region
from ..comm.memory.heap import SymmetricHeap
from ..engine.engine import Engine
from ..engine.gradients import Accumulator, Target
from ..engine.landing import PendingGradient
from .found import FoundParameter, FoundUnit


class BridgedUnit:
    """As the engine sees it: `engine.sharded.Sharded`, for all parameters of a unit together."""

    is_scalar = False
    is_split = False  # each replica has all masters of a shard
    original = None

    def __init__(
        self,
        found: FoundUnit,
        *,
        slot: int,
        compute: Region,
        gradient: Region | None,
        heap: SymmetricHeap,
        accumulator: Accumulator,
        engine: Engine,
        zeros: Zeros,
    ) -> None:
        self.found, self.name, self._heap, self._engine = found, found.name, heap, engine
        self._accumulator = accumulator
        self.compute_shards = [heap.shard(compute, owner) for owner in range(heap.world)]
        self.gradient_shard: torch.Tensor | None = None
        if gradient is not None:
            shards = [heap.shard(gradient, owner) for owner in range(heap.world)]
            self.gradient_shard = shards[heap.rank]
            self.target = Target(slot=slot, shards=shards, rank=heap.rank, near=heap.near)
        self.landing = UnitLanding(self)
        self._differs: torch.Tensor | None = None  # bool []: the published shard from FSDP2's own, since last asked
        self.gather, self.reduce = _Gather(self), _Reduce(self, zeros)

    def connect(self) -> None:
        """From now on FSDP2 communicates by this unit."""
        for module in self.found.modules:
            module.set_custom_all_gather(self.gather)
            module.set_custom_reduce_scatter(self.reduce)
            module.set_gradient_divide_factor(1.0)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                module.set_reduce_scatter_unused_params(True, recurse=False)
        for each in self.found.trained:
            each.sharded.register_post_accumulate_grad_hook(self._take_gradient(each))

    @property
    def is_replicated(self) -> bool:
        return self._engine.replicas.count > 1

    @property
    def takes_zeros(self) -> bool:
        """Whether FSDP2 reduces by `reduce`. One rank that has the whole unit reduces nothing."""
        return self._heap.world > 1

    # ------------------------------------------------------------------ what the engine asks

    @property
    def trains(self) -> bool:
        return self.gradient_shard is not None

    @property
    def optimized(self) -> list[nn.Parameter]:
        return [each.sharded for each in self.found.parameters]

    def follow_requires_grad(self) -> None:
        """Raises RuntimeError for what changed since `use_odc`."""
        trained = set(map(id, self.found.trained))
        for each in self.found.parameters:
            if each.sharded.requires_grad != (id(each) in trained):
                now = "frozen" if id(each) in trained else "unfrozen"
                raise RuntimeError(f"{each.name} was {now} after use_odc: choose what trains before use_odc")
            if len(each.sharded._post_accumulate_grad_hooks or ()) > (id(each) in trained):
                raise RuntimeError(
                    f"{each.name} has a gradient hook, which would see no gradient (optimizer-in-backward registers "
                    f"such hooks): step the optimizer after the minibatch instead"
                )

    def to_clear(self) -> torch.Tensor | None:
        """Drops the gradients; returns this rank's gradient shard if it must be zeroed."""
        dirty = self.landing.dirty
        self.landing.drop()
        self.landing.touched = self.landing.dirty = False
        return self.gradient_shard if dirty else None

    def to_publish(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(part of this rank's compute shard, master), to be copied after each step."""
        for module in self.found.modules:
            module.reshard()  # FSDP2 keeps a root whole after an evaluation: it would not be gathered again
        own = self.compute_shards[self._heap.rank]
        for each, offset in self._places():
            local, dtype = each.local.reshape(-1), each.compute_dtype
            into = own[offset : offset + local.numel() * dtype.itemsize]
            if offset % dtype.itemsize == 0:
                yield into.view(dtype), local
            else:  # a unit of several dtypes, which FSDP2 gathers as bytes
                yield into, local.to(dtype).view(torch.uint8)

    def wholes(self) -> list[tuple[str, torch.Tensor]]:
        """[(name, a copy of the whole tensor in the compute dtype)] of all parameters."""
        shards = self.compute_shards  # a clone of a part is aligned to its dtype
        return [
            (each.name, each.joined([s[offset : offset + size].clone().view(each.compute_dtype) for s in shards]))
            for each, offset in self._places()
            for size in [each.padded * each.compute_dtype.itemsize]
        ]

    def _places(self) -> Iterator[tuple[FoundParameter, int]]:
        """Each parameter and where its part of a compute shard begins, in bytes."""
        offset = 0
        for each in self.found.parameters:
            yield each, offset
            offset += each.padded * each.compute_dtype.itemsize

    # ------------------------------------------------------------------ what FSDP2 asks

    @torch.no_grad()
    def read(self, output: torch.Tensor, own: torch.Tensor, world: int) -> None:
        """Fills `output` with all owners' compute shards. `own`: this rank's, as FSDP2 has it, maybe in `output`."""
        heap, engine = self._heap, self._engine
        if world != heap.world:
            raise RuntimeError(
                f"unit {self.name} is gathered from {world} ranks instead of {heap.world}: call "
                f"set_reshard_after_forward(True), an int is not supported"
            )
        if own.nbytes != len(self.compute_shards[heap.rank]):
            raise RuntimeError(
                f"FSDP2's shard of unit {self.name} has {own.nbytes} bytes and was expected to have "
                f"{len(self.compute_shards[heap.rank])}: were parameters added or replaced after use_odc?"
            )
        if not engine.is_open and not engine.passes.in_forward:
            engine.publication.wait_readable()  # unshard() outside of a forward
        engine.streams.computes_here()
        if not engine.is_open:  # a minibatch publishes at its entry
            differs = (self.compute_shards[heap.rank] != own.view(torch.uint8)).any()
            self._differs = differs if self._differs is None else self._differs | differs
        rows = output.view(torch.uint8).view(world, -1)
        for step in range(1, world):
            owner = (heap.rank + step) % world
            rows[owner].copy_(self.compute_shards[owner], non_blocking=True)
        if rows[heap.rank].data_ptr() != own.data_ptr():
            rows[heap.rank].copy_(own.view(torch.uint8))

    @torch.no_grad()
    def check_layout(self) -> None:
        """After a publication: raises RuntimeError unless FSDP2 lays out its shard as the published one is laid out."""
        self.found.modules[0].unshard()
        self.found.modules[0].reshard()
        if self.is_stale():
            raise RuntimeError(
                f"torch {torch.__version__} lays out the shard of unit {self.name} in another way than use_odc knows: "
                f"use_odc knows torch 2.11 to 2.15"
            )

    def is_stale(self) -> bool:
        """Whether what was gathered outside of minibatches since the last call was published before FSDP2's parameters
        changed. After a drain.
        """
        differs, self._differs = self._differs, None
        return differs is not None and bool(differs)

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a flat gradient, all owners' shards one after another, to the owners."""
        if not self._engine.is_open:
            raise RuntimeError("backward outside of a minibatch: put it into `with minibatch(model):`")
        if gradient.numel() != len(self.gradient_shard) * self._heap.world:
            raise RuntimeError(
                f"unit {self.name} got gradients of {gradient.numel()} elements instead of "
                f"{len(self.gradient_shard) * self._heap.world}: some parameter had none, and torch "
                f"{torch.__version__} can't tell which (set_reduce_scatter_unused_params came with 2.13). Use every "
                f"parameter in each microbatch, for example by adding 0 * p.sum() to the loss, or update torch"
            )
        self.landing.touched = True
        self._engine.streams.computes_here()
        self._accumulator.add(
            gradient, self.target, name=f"unit {self.name}", waited=lambda waits: self._engine.waited(self, waits)
        )

    def _take_gradient(self, each: FoundParameter) -> Any:
        """What runs when FSDP2 has set `p.grad`: zeros, or where one rank has the whole unit, the gradient."""

        @torch.no_grad()
        def take(sharded: torch.Tensor) -> None:
            gradient, sharded.grad = sharded.grad, None
            if not self.takes_zeros:
                self.landing.part_of(each).add_(gradient.to_local().reshape(-1))
                self.landing.touched = True
            self.landing.expect_gradient(each)

        return take


class UnitLanding:
    """`p.grad` of a unit's parameters: `engine.sharded.Lands`."""

    def __init__(self, unit: BridgedUnit) -> None:
        self._unit = unit
        self._trained = unit.found.trained
        self._pending = {id(each): PendingGradient(each.sharded) for each in self._trained}
        self.touched = self.dirty = False

    @property
    def has_gradient(self) -> bool:
        return any(each.sharded.grad is not None for each in self._trained)

    @property
    def dtype(self) -> torch.dtype:
        return self._trained[0].sharded.dtype

    def expect_gradient(self, only: FoundParameter | None = None) -> None:
        """Inside a minibatch: using `p.grad` raises."""
        for each in self._trained if only is None else [only]:
            if each.sharded.grad is None:
                each.sharded.grad = self._pending[id(each)]

    def make_way(self) -> None:
        """FSDP2 is about to set `p.grad`, and would add to what is there."""
        for each in self._trained:
            each.sharded.grad = None

    def expect_no_more(self) -> bool:
        """The minibatch ends. Returns whether `p.grad` was assigned inside it."""
        given = [each.sharded.grad for each in self._trained if each.sharded.grad is not None]
        self.make_way()
        return any(not isinstance(gradient, PendingGradient) for gradient in given)

    def drop(self) -> None:
        self.make_way()
        self.dirty = True

    def check_memory(self, name: str) -> None:
        """The masters are FSDP2's: it looks after them."""

    def own_sum(self) -> torch.Tensor:
        return self._unit.gradient_shard

    def own_gradient(self, own_sum: torch.Tensor) -> torch.Tensor:
        return own_sum

    def land(self, gradient: torch.Tensor | None) -> None:
        """Hands the landed flat gradient of all parameters to the optimizer; None if no rank contributed."""
        self.touched = False
        self.dirty = self.dirty or gradient is not None
        for each, offset in self._places():
            each.sharded.grad = None if gradient is None else each.as_dtensor(gradient[offset:])

    def part_of(self, wanted: FoundParameter) -> torch.Tensor:
        """Its part of this rank's gradient shard, without padding."""
        for each, offset in self._places():
            if each is wanted:
                return self._unit.gradient_shard[offset : offset + each.local.numel()]
        raise KeyError(wanted.name)

    def _places(self) -> Iterator[tuple[FoundParameter, int]]:
        offset = 0
        for each in self._trained:
            yield each, offset
            offset += each.padded


class Zeros:
    """What FSDP2 takes as reduced gradients: the same memory for all units, as with replicas it keeps each of them."""

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

    def __init__(self, unit: BridgedUnit, zeros: Zeros) -> None:
        self._unit, self._zeros = unit, zeros

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._unit.landing.make_way()
        if self._unit.takes_zeros and math.prod(size) == len(self._unit.gradient_shard):
            return self._zeros.of(math.prod(size), dtype, device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._unit.add(input_tensor)
        output_tensor.zero_()
        if self._unit.is_replicated:  # FSDP2 keeps its sum, and sets no p.grad
            self._unit.landing.expect_gradient()
