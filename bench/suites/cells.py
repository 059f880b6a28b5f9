"""What ranks with simulated compute train (sleeping.py), and the ways in which they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odc_triton.balance import CostModel
from odc_triton.plan.entries import Entry
from odc_triton.plan.planner import SPLIT, make_plan
from odc_triton.plan.samples import Limits, Samples
from odc_triton.plan.split import readable_tokens
from odc_triton.simulate import Job, Links, simulate
from odc_triton.tools.simulate.job import sizes_of

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """`schedule`: "fsdp", a barrier before every layer, or "odc". `balance`: how samples are assigned."""

    schedule: str
    balance: str

    @property
    def name(self) -> str:
        how = {"global": "global packing", "mini": "LB-Mini", SPLIT: "split"}
        return f"{'layer barrier' if self.schedule == 'fsdp' else 'ODC'} + {how[self.balance]}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Minibatches that each of `ways` runs, in turn. `minibatches`: tokens of all ranks' samples.

    `seconds_per_cost`: sleep per unit of `cost`, forward and backward, over all `layers`. `hosts`: of equally many
    ranks, with a replica of the model on each.
    """

    name: str
    samples: int  # per rank
    minibatches: list[list[int]]
    ways: tuple[Way, ...]
    token_cap: int
    cost: CostModel
    seconds_per_cost: float
    layers: int
    hosts: int = 1

    def seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of one microbatch."""
        return self.seconds_per_cost * self.cost.pack(lengths)

    def split_tokens(self, ranks: int) -> int:
        """Of each rank, the most tokens that others read."""
        how = {"ranks": ranks, "samples": self.samples * ranks, "token_cap": self.token_cap, "cost": self.cost}
        return readable_tokens([self.token_cap], replicas=self.hosts, **how)

    def even_share_s(self, index: int, ranks: int) -> float:
        """Seconds of minibatch `index` if each rank computes an equal part."""
        return self.seconds_per_cost * sum(map(self.cost.sequence, self.minibatches[index])) / ranks

    def bound_s(self, index: int, ranks: int) -> float:
        """Seconds of minibatch `index` in which all ranks compute all the time, or one host its longest sample."""
        costs = [self.cost.sequence(tokens) for tokens in self.minibatches[index]]
        return self.seconds_per_cost * max(sum(costs) / ranks, max(costs) * self.hosts / ranks)

    def job(self, ranks: int, barrier_s: float) -> Job:
        """The same for the simulator."""
        return Job(
            links=Links.none(ranks),
            seconds=self.seconds,
            cost=self.cost,
            layers=self.layers,
            forward_share=FORWARD_SHARE,
            prefetch=False,
            overlap=False,
            barrier_s=barrier_s,
        )

    def simulated_s(self, way: Way, ranks: int, empty_s: float = 0.0) -> list[float]:
        """Simulated seconds of each minibatch. `empty_s`: measured seconds of one without microbatches."""
        # The simulator's FSDP synchronises once, at the end; here both enter and leave the engine's minibatch.
        barrier_s = empty_s / 2 if way.schedule == "odc" else empty_s
        how = {"schedule": way.schedule, "balance": way.balance, "token_cap": self.token_cap}
        if way.balance == SPLIT:
            how["assigned"] = [
                [[sizes_of(pack, lengths) for pack in packs] for packs in self.assigned(way, index, ranks)]
                for index, lengths in enumerate(self.minibatches)
            ]
        return simulate(self.minibatches, job=self.job(ranks, barrier_s), **how).seconds.tolist()

    def assigned(self, way: Way, index: int, ranks: int) -> list[list[list[Entry]]]:
        """Every rank's packs of minibatch `index`."""
        over = {"replicas": self.hosts, "split_tokens": self.split_tokens(ranks)} if way.balance == SPLIT else {}
        limits = Limits(ranks=ranks, token_cap=self.token_cap, **over)
        plan = make_plan(Samples.of(limits.checked(self.minibatches[index]), self.cost), limits, way.balance)
        return [plan.packs(rank) for rank in range(ranks)]
