"""One parameter of a model that `fully_shard` sharded: its leaf, which modules compute with, over its shard.

whole, leaf     [N, ...] in the compute dtype: what modules compute with, a scalar as 0-d; where it is stored:
                `Residency`
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from odc_kernels.peers import PeerShards
from odc_kernels.staged import StagedWeight, Staging

from ..nn.operand import AddRows, Table, handle_of, kept_dtype, resolve
from .gathered import GatheredParameters
from .protocol import Protocol as MinibatchProtocol
from .shard import HeapShard
from .transport import Transport, Waits

if TYPE_CHECKING:
    from .kept import RowsOfOwners


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """True if something waits for this parameter's gradient in a backward: user hooks, optimizer-in-backward."""
    return bool(
        parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
        or getattr(parameter, "_in_backward_optimizers", None)  # of torch.distributed.optim
    )


def parameter_of_shard(shard: torch.Tensor) -> ShardedParameter | None:
    """The parameter of which optimizers see `shard`; None if it is not sharded. RuntimeError if its model is gone."""
    handle = getattr(shard, "_odc_shard_of", None)
    parameter = None if handle is None else resolve(handle)
    return parameter if isinstance(parameter, ShardedParameter) else None


class TakesGradients(Protocol):
    """Where a parameter asks whether a gradient is allowed now: a model's passes."""

    protocol: MinibatchProtocol

    def gradient_comes(self) -> None: ...

    def waited(self, name: str, waits: Waits) -> None: ...


class Residency(Enum):
    """The place of a parameter's whole tensor."""

    VIEW = "in the heap: its shards are adjacent there"
    GATHERED = "in a storage of its unit's, filled for as long as it is needed"
    ON_DEMAND = "nowhere: its modules read the owners on demand"


class ShardedParameter:
    """A `nn.operand.ShardedOperand`. `shard`: its memory; `number`: its number in the plan; `like`: what was sharded,
    whose class and attributes the leaf of a packed one has.

    `whole`: the tensor under `leaf`; `gathered`: its unit's storage, None where it is a view or never whole.
    `table`: how operators on it run. `rows`: those of others here, where shards are apart.
    """

    def __init__(
        self,
        *,
        shard: HeapShard,
        number: int,
        like: nn.Parameter,
        whole: torch.Tensor,
        gathered: GatheredParameters | None,
        transport: Transport,
        staging: Staging,
        table: Table = (),
        rows: RowsOfOwners | None = None,
    ) -> None:
        self.rows = rows
        self.shard, self.spec, self.number, self.sharded = shard, shard.spec, number, shard.sharded
        self.world, self.shape = shard.world, shard.spec.shape
        vars(self.sharded)["_odc_shard_of"] = handle_of(self)
        self.gathered, self.staging, self._transport = gathered, staging, transport
        if not transport.heap.apart:
            self.residency = Residency.VIEW
        else:
            self.residency = Residency.ON_DEMAND if gathered is None else Residency.GATHERED
        self.leaf = nn.Parameter(whole.view(self.spec.whole_shape), requires_grad=shard.trains)
        if kept_dtype(like) is not None:
            self.leaf = torch.Tensor._make_subclass(type(like), self.leaf.data, False)
            vars(self.leaf).update(vars(like))
        vars(self.leaf).update(_odc_handle=handle_of(self), _odc_never_whole=self.is_never_whole)
        self.table = table
        self._rank = transport.heap.rank
        self._accumulation: Node | None = None  # autograd's node that its gradient reaches
        self._hook: Any = None
        self._passes: weakref.ref[TakesGradients] | None = None
        self.original: weakref.ref[nn.Parameter] | None = None  # what it was before sharding

    def versioned(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose version counters show an edit in place."""
        return self.sharded, self.sharded._local_tensor, self.leaf

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
        """True if `leaf` never has memory: only modules that read the owners on demand may use it."""
        return self.residency is Residency.ON_DEMAND

    @property
    def compute_peers(self) -> PeerShards:
        return self.shard.compute_peers

    def read(self) -> torch.Tensor:
        return self.shard.read()

    def parts(self, source: str) -> list[torch.Tensor]:
        """As in `ShardedOperand`; if the whole tensor is a view, so is everything but a staged copy."""
        if source == "staged":
            return [self.read()]
        if self.residency is Residency.VIEW:
            return [self.leaf.detach()]
        if source == "direct":
            return self.shard.compute_shards
        # Not filled in a backward that the unit did not see: of an output that is no tensor, or of an inner tensor.
        if self.gathered is None or not self.gathered.is_filled:
            return [self.read()]
        self.gathered.wait()
        return [self.leaf.detach()]

    @property
    def table(self) -> Table:
        """The choice of how operators on it run. Stored on the leaf, where compiled layers must see it."""
        return vars(self.leaf)["_odc_table"]

    @table.setter
    def table(self, table: Table) -> None:
        vars(self.leaf)["_odc_table"] = table

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def trains(self) -> bool:
        return self.shard.trains

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    def pull(self) -> StagedWeight:
        return self.staging.pull(self.shard.compute_peers)

    def row_peers(self) -> PeerShards:
        return self.compute_peers if self.rows is None else self.rows.row_peers()

    def copied(self, rows: Sequence[int] | None) -> Iterator[tuple[int, torch.Tensor]]:
        if self.rows is not None:
            yield from self.rows.copied(rows)
            return
        (whole,) = self.parts("gathered")
        yield from ((0, whole),) if rows is None else ((row, whole[row : row + 1]) for row in rows)

    def owners_from_own(self) -> Iterator[int]:
        for step in range(self.shard.world):
            owner = (self._rank + step) % self.shard.world
            if self.shard.rows[owner][0] < self.shard.rows[owner][1]:
                yield owner

    def first_row(self, owner: int) -> int:
        return self.shard.rows[owner][0] if owner < self.shard.world else self.shard.rows[-1][1]

    def listen(self, passes: TakesGradients) -> None:
        """Adds each gradient that a backward makes to the owners, and reports it to `passes`.

        By weak references: the garbage collector does not see into hooks of tensors, so a cycle through one would
        keep the heap forever.
        """
        if self._hook is not None:
            self._hook.remove()
        parameter = weakref.ref(self)
        self._passes = weakref.ref(passes)

        def accumulated(_: torch.Tensor) -> None:
            if (this := parameter()) is not None:
                gradient, this.leaf.grad = this.leaf.grad, None
                this.add_gradient(gradient)

        self._hook = self.leaf.register_post_accumulate_grad_hook(accumulated)

    @property
    def passes(self) -> TakesGradients | None:
        """Those of its engine; None if it does not train."""
        return None if self._passes is None else self._passes()

    def gradient_comes(self) -> None:
        """Call before adding anything to the owners. Raises if no gradient is allowed now."""
        if (passes := self.passes) is not None:
            passes.gradient_comes()

    def wants_gradient(self) -> bool:
        if self.leaf._backward_hooks:
            raise RuntimeError(
                f"{self.name} has a gradient hook, and its layer adds the gradient to the owners without autograd: "
                f"change p.grad after the minibatch instead, or leave the layer out of replace_layers"
            )
        # Not in a backward: an operator was called alone. Not in a minibatch: `open_sink` will raise.
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
        sink = self._transport.sink(self.shard.target, name=self.name, waited=self._waited)
        return sink if self.rows is None else self.rows.sink(sink, self.shard.target)

    def add_sums(self, owner: int, at: int, sums: torch.Tensor) -> None:
        """Adds sums of gradients of kept rows to an owner's, from `at` on."""
        self._transport.add_sums(self.shard.target, owner, at, sums, name=self.name, waited=self._waited)

    def _touch(self) -> None:
        self.gradient_comes()
        self.shard.expect_gradient()  # again, as zero_grad() inside a minibatch sets p.grad to None
        self.shard.touched = True

    def _waited(self, waits: Waits) -> None:
        if waits and (passes := self.passes) is not None:
            passes.waited(self.name, waits)

    def add_gradient(self, gradient: torch.Tensor | None) -> None:
        """Adds a gradient [N, ...] to its owners' shards. None: an operator has added it, and returned None."""
        if gradient is None:
            self.gradient_comes()
            return
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self._touch()
        gradient = gradient.detach()
        if gradient.shape != self.shape:
            gradient = gradient.reshape(self.shape)
        self._transport.add(gradient, self.shard.target, name=self.name, waited=self._waited)

    def follow_requires_grad(self) -> None:
        """Makes modules compute its gradient if the user wants one now. Raises RuntimeError if there can't be one."""
        self.leaf.grad = None  # a backward that raised may have left one
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


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in the module tree where a parameter is registered. Tied parameters have several."""

    module: nn.Module
    attribute: str
    parameter: ShardedParameter

    def put(self, value: nn.Parameter) -> None:
        # Modules such as nn.LSTM override __setattr__ to keep lists of their weights: they must see it.
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = value
        else:
            setattr(self.module, self.attribute, value)


def written_in_forward(root: nn.Module) -> set[tuple[int, str]]:
    """(id of the module, attribute) of parameters that a forward writes, alike on all ranks: nn.Embedding(max_norm=…)
    shortens rows in place. PEFT's wrapper of a bare parameter, as routers and experts have, registers a
    parametrization, which sets the parameter to the storage that it has."""
    modules = list(root.modules())
    shortened = {(id(each), "weight") for each in modules if getattr(each, "max_norm", None) is not None}
    named: list[Any] = [each for each in modules if hasattr(each, "parameter_name")]
    wrappers = [each for each in named if hasattr(each, "get_base_layer")]
    return shortened | {(id(each.get_base_layer()), each.parameter_name) for each in wrappers}
