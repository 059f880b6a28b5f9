"""One sharded model on one rank: its units and parameters, which take part in the minibatch protocol."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..comm.barrier import Barrier
from ..comm.replicas import Grid, Replicas
from .collectives import NoCollectives
from .exact import ExactSums
from .parameter import ShardedParameter
from .participant import RefusesDeterminism, Trained
from .passes import Passes
from .protocol import Protocol
from .transport import Transport
from .unit import Prefetch, Unit, Units

_IN_ANY_ORDER = (
    "torch.use_deterministic_algorithms(True) came after fully_shard, and this model's gradients are added in the "
    "order of their arrival: set it before, or give fully_shard(model, exact=True)"
)


class Engine(Protocol):
    """`deterministic`: sums of gradients have the same bits in whatever order ranks add, by exact.py. `debug`: refuses
    collectives inside a minibatch.
    """

    def __init__(
        self,
        *,
        grid: Grid,
        transport: Transport,
        barrier: Barrier,
        replicas: Replicas,
        deterministic: bool,
        debug: bool,
    ) -> None:
        super().__init__(grid=grid, transport=transport, barrier=barrier, replicas=replicas)
        self.deterministic = deterministic
        self.units: list[Unit] = []
        self.parameters: list[ShardedParameter] = []  # those of `shards`, in their order
        self.ignored: dict[int, nn.Parameter] = {}  # fully_shard's ignored_params, by id
        self.attention: dict[str, float] = {}  # as in `nn.tuned.Tuned`, the same on all ranks
        self.prefetch = Prefetch()
        self.passes = Passes(
            self,
            owners=range(grid.first, grid.first + grid.shards),
            units=self.units,
            microbatch_ends=self.prefetch.microbatch_ends,
        )
        self.register(
            *([NoCollectives()] if debug else []),
            self.passes,
            Units(self.units, self.parameters, self.ignored),
            Trained(self.shards),
            ExactSums(self.shards, self) if deterministic else RefusesDeterminism(_IN_ANY_ORDER),
        )

    def add(self, parameters: list[ShardedParameter]) -> None:
        for parameter in parameters:
            self.parameters.append(parameter)
            self.shards.append(parameter.shard)
            self.streams.watch(parameter.staging)
            if parameter.trains:
                parameter.listen(self.passes)

    def absorb(self, inner: Engine) -> None:
        """Takes over a submodule that was sharded before its root; its parameters stay where they are."""
        for unit in inner.units:
            unit.join(self.passes, self.prefetch)
            unit.module._odc_engine = self
        self.units += inner.units
        self.ignored |= inner.ignored
        self.streams.join(inner.streams)
        self.add(inner.parameters)
        inner.optimizers.stop()

    def name_parameters(self, root: nn.Module) -> None:
        """Names every parameter as seen from the root."""
        names = {id(value): name for name, value in root.named_parameters()}
        for shard in self.shards:
            shard.name = names[id(shard.sharded)]

    def originals(self) -> Iterator[tuple[nn.Parameter, ShardedParameter]]:
        """Parameters as they were before sharding, where something still holds them: a tie into this module."""
        for parameter in self.parameters:
            original = parameter.original() if parameter.original is not None else None
            if original is not None:
                yield original, parameter
