"""What ranks whose layers sleep train (sleeping.py), and the ways in which they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odc_triton.balance import CostModel, assign
from odc_triton.plan.pieces import Entry, Piece
from odc_triton.plan.split import assign_split, readable_tokens
from odc_triton.simulate import Job, Links, simulate
from odc_triton.tools.simulate.job import SPLIT

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
        given = {"ranks": ranks, "token_cap": self.token_cap, "cost": self.cost}
        if way.balance == SPLIT:
            given |= {"tokens": self.split_tokens(ranks), "replicas": self.hosts}
            split = assign_split(self.minibatches[index], **given)
            return [split.packs(rank) for rank in range(ranks)]
        return assign(self.minibatches[index], balance=way.balance, **given)


def sizes_of(pack: Sequence[Entry], lengths: Sequence[int]) -> list[int | Piece]:
    return [each if isinstance(each, Piece) else lengths[each] for each in pack]
