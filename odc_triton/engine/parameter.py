"""One parameter, sharded over its owners, as operators see it.

The tensors of a parameter of shape [N, ...] that the R ranks of a replica share, n = ceil(N / R) rows each:

compute shard   [n, ...] of each owner, in the heap, in the compute dtype: what every rank reads
gradient shard  [n, ...] of each owner, in the heap, in the reduce dtype: what every rank adds to
part            this rank's rows of its shard: all of them, unless there are several replicas
master          this rank's part in the master dtype: what the optimizer steps. If the dtypes agree, it is the compute
                shard's part itself
whole, leaf     [N, ...] in the compute dtype: what modules compute with, a scalar as 0-d; where it is stored:
                `Residency`
sharded         a DTensor over the master, Shard(0): what optimizers and checkpoints see
landed          this rank's part of the summed gradient, as a DTensor: `sharded.grad` after a minibatch
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from odc_kernels.peers import PeerShards
from odc_kernels.staged import StagedWeight, Staging

from ..comm.grid import Grid
from ..comm.layout import ParameterSpec, Region
from ..comm.memory.heap import SymmetricHeap
from ..nn.choice import TABLE, Entry
from ..nn.operand import AddRows, handle_of, resolve
from .edits import Edits
from .gathered import GatheredParameters
from .gradients import Accumulator, Waits
from .landing import Landing
from .storage import Storage


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether something waits for this parameter's gradient in a backward: user hooks, optimizer-in-backward."""
    return bool(
        parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
        or getattr(parameter, "_in_backward_optimizers", None)  # of torch.distributed.optim
    )


def parameter_of_shard(shard: torch.Tensor) -> ShardedParameter | None:
    """The parameter of which optimizers see `shard`; None if it is not sharded. RuntimeError if its model is gone."""
    handle = getattr(shard, "_odc_shard_of", None)
    return None if handle is None else resolve(handle)


class Listener(Protocol):
    """What hears of gradients that reach a sharded parameter: its engine."""

    def gradient_comes(self, parameter: ShardedParameter) -> None:
        """A backward has made some of its gradient. Raises if no gradient is allowed now."""

    def waited(self, parameter: ShardedParameter, waits: Waits) -> None:
        """Adding it had to wait for other ranks at these times."""


class Residency(Enum):
    """Where a parameter's whole tensor is stored."""

    VIEW = "in the heap: its shards are adjacent there"
    GATHERED = "in a storage of its unit's, filled for as long as it is needed"
    ON_DEMAND = "nowhere: its modules read the owners by themselves"


class ShardedParameter:
    """What operators see is `nn.operand.ShardedOperand`. `storage`: its memory. `landing`: what the optimizer gets.

    `whole`: the tensor under `leaf`; `gathered`: its unit's storage, None where it is a view or never whole.
    `accumulator`: how gradients are added. `table`: how operators on it run.
    """

    is_split = True

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
        self.spec, self.slot, self.name = spec, slot, spec.name
        self.storage = Storage(spec=spec, slot=slot, compute=compute, gradient=gradient, heap=heap, grid=grid)
        trains = gradient is not None
        self.sharded = nn.Parameter(self.storage.as_dtensor(self.storage.master), requires_grad=trains)
        self.sharded._odc_shard_of = handle_of(self)
        self.landing = Landing(self.sharded, self.storage)
        self.gathered, self.staging, self._accumulator = gathered, staging, accumulator
        if not heap.apart:
            self.residency = Residency.VIEW
        else:
            self.residency = Residency.ON_DEMAND if gathered is None else Residency.GATHERED
        self.leaf = nn.Parameter(whole.view(spec.whole_shape), requires_grad=trains)
        self.leaf._odc_handle = handle_of(self)
        self.leaf._odc_never_whole = self.is_never_whole
        self.table = table
        self._rank = heap.rank
        self._accumulation: Node | None = None  # autograd's node that its gradient reaches
        self._hook: Any = None
        self._listener: weakref.ref[Listener] | None = None
        self.original: weakref.ref[nn.Parameter] | None = None  # what it was before sharding
        self.edits = Edits((self.sharded, self.leaf))

    @torch.no_grad()
    def hold_whole(self) -> None:
        """Allocates and fills a leaf that is otherwise never whole, for a caller that asked to read parameters."""
        if self.is_never_whole:
            self.leaf.untyped_storage().resize_(self.leaf.numel() * self.leaf.element_size())
            self.leaf.data.copy_(self.read())

    def let_go(self) -> None:
        """Frees the memory of a leaf that is otherwise never whole."""
        if self.is_never_whole:
            self.leaf.untyped_storage().resize_(0)

    @property
    def is_never_whole(self) -> bool:
        """Whether `leaf` never has memory: only modules that read the owners by themselves may use it."""
        return self.residency is Residency.ON_DEMAND

    @property
    def compute_peers(self) -> PeerShards:
        return self.storage.compute_peers

    def read(self) -> torch.Tensor:
        return self.storage.read()

    def parts(self, strategy: str) -> list[torch.Tensor]:
        """As in `ShardedOperand`; if the whole tensor is a view, so is everything but a staged copy."""
        if strategy == "staged":
            return [self.read()]
        if self.residency is Residency.VIEW:
            return [self.leaf.detach()]
        if strategy == "direct":
            return self.storage.compute_shards
        # Not filled in a backward that the unit did not hear of: of an output that is no tensor, or of an inner tensor.
        if self.gathered is None or not self.gathered.is_filled:
            return [self.read()]
        self.gathered.wait()
        return [self.leaf.detach()]

    @property
    def table(self) -> tuple[Entry, ...]:
        """How operators on it run. Stored on the leaf, where compiled layers must see it."""
        return self.leaf._odc_table

    @table.setter
    def table(self, table: tuple[Entry, ...]) -> None:
        self.leaf._odc_table = table

    @property
    def world(self) -> int:
        return self.storage.world

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    def pull(self) -> StagedWeight:
        return self.staging.pull(self.storage.compute_peers)

    def owners_from_own(self) -> Iterator[int]:
        for step in range(self.storage.world):
            owner = (self._rank + step) % self.storage.world
            if self.storage.rows[owner][0] < self.storage.rows[owner][1]:
                yield owner

    def first_row(self, owner: int) -> int:
        return self.storage.rows[owner][0] if owner < self.storage.world else self.storage.rows[-1][1]

    def listen(self, listener: Listener) -> None:
        """Adds each gradient that a backward makes to the owners, and tells `listener` of it.

        By weak references: the garbage collector does not see into hooks of tensors, so a cycle through one would
        keep the heap forever.
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

    @property
    def listener(self) -> Listener | None:
        """Its engine; None if it does not train."""
        return None if self._listener is None else self._listener()

    def gradient_comes(self) -> None:
        """Call before adding anything to the owners. Raises if no gradient is allowed now."""
        if (listener := self.listener) is not None:
            listener.gradient_comes(self)

    def wants_gradient(self) -> bool:
        if self.leaf._backward_hooks:
            raise RuntimeError(
                f"{self.name} has a gradient hook, and its layer adds the gradient to the owners without autograd: "
                f"change p.grad after the minibatch instead, or leave the layer out of replace_layers"
            )
        # Not in a backward: an operator was called by itself. Not in a minibatch: `open_sink` will raise.
        if torch._C._current_graph_task_id() == -1 or self._accumulation is None:
            return True
        try:
            return torch._C._will_engine_execute_node(self._accumulation)
        except RuntimeError:
            raise RuntimeError(
                f"torch.autograd.grad was asked for the gradient of {self.name}, which goes to its owners: call "
                f"backward() inside the minibatch and read .grad after it, or leave its layer out of replace_layers"
            ) from None

    def open_sink(self) -> PeerShards | AddRows:
        self._touch()
        return self._accumulator.sink(self.storage.target, name=self.name, waited=self._report)

    def _touch(self) -> None:
        self.gradient_comes()
        self.landing.touched = True
        self.landing.expect_gradient()  # again, as zero_grad() inside a minibatch sets p.grad to None

    def _report(self, waits: Waits) -> None:
        if waits and (listener := self.listener) is not None:
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
            self._accumulator.add(
                gradient.reshape(self.spec.shape), self.storage.target, name=self.name, waited=self._report
            )

    @property
    def optimized(self) -> tuple[nn.Parameter, ...]:
        """What optimizers hold of it."""
        return (self.sharded,)

    def to_publish(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(own part to read, master), to be copied after each step."""
        return self.storage.to_publish()

    def wholes(self) -> list[tuple[str, torch.Tensor]]:
        """[(name, a copy of the whole tensor in the compute dtype)]."""
        return [(self.name, self.storage.read())]

    @property
    def trains(self) -> bool:
        """Whether it has a gradient, as decided when it was sharded."""
        return self.storage.gradient_shard is not None

    def follow_requires_grad(self) -> None:
        """Makes modules compute its gradient if the user wants one now. Raises RuntimeError if there can't be one."""
        if has_gradient_hooks(self.sharded):
            raise RuntimeError(
                f"{self.name} has gradient hooks, which never fire on a sharded parameter (optimizer-in-backward "
                f"registers such hooks). Step the optimizer after the minibatch instead."
            )
        if self.sharded.requires_grad and not self.trains:
            raise RuntimeError(f"{self.name} was frozen when fully_shard was called; set requires_grad before that")
        if self.trains:
            self.leaf.requires_grad_(self.sharded.requires_grad)
            # Made in the first minibatch, as it keeps the stream that is current then: torch warns of a backward on
            # another.
            if self.leaf.requires_grad and self._accumulation is None:
                self._accumulation = get_gradient_edge(self.leaf).node

    def to_clear(self) -> torch.Tensor | None:
        """Drops its gradient; returns this rank's gradient shard if this rank must zero it."""
        self.leaf.grad = None
        return self.landing.to_clear()
