"""Muon's step on the CPU: by one-sided reads, and in the two ways of FSDP2's users.

    python -m bench.reports.muon [--ranks 2] [--rounds 30] [--out FILE]

one-sided    odc_triton.optim.Muon
all-to-all   each matrix has an owner, dealt as in ours; rows go there and back in buckets of 32 MiB
all-gather   every rank gathers every matrix and orthogonalises it
floor        Newton-Schulz of a rank's own matrices, and nothing else: no way is faster

The matrices are those of the demo's blocks. Gradients are given, so a step is momentum, Newton-Schulz and update, with
the publication of ours. All ways take turns in one job, in a rotating order; a step lasts as long as its slowest rank.
Rows travel in bf16 everywhere. After the first steps each way's weights are compared with torch.optim.Muon's on whole
matrices. Bytes are those that leave a rank for others, of all ranks together.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz

from odc_triton.balance.partition import balanced_partition
from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.comm.layout import shard_rows
from odc_triton.optim import Muon
from odc_triton.optim.room import newton_schulz_cost
from odc_triton.sharding.shard import fully_shard

from .. import quiet
from ..demo import CONFIG
from ..harness import Work, bootstrap_ratio, gather, in_turn, open_job, single_thread_environment
from ..provenance import about, options_of, save_json

LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch's defaults
BUCKET_BYTES = 32 * 2**20
CHECKED = 3  # steps that warm up, after which weights are compared
MOST_ANEW = 4  # times as many rounds as wanted
REST_S = 1.0  # after a disturbed round, as whoever disturbed it may be through then


def build() -> nn.Module:
    return nn.Sequential(*Work(dataset="", config=CONFIG, minibatches=[], token_cap=0).build().model.layers)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    return _zeropower_via_newtonschulz(update, COEFFICIENTS, STEPS, EPS)


class Way(ABC):
    """`bytes`: that left this rank for others in the last step."""

    name: str
    bytes = 0

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = self.shard(build())
        self.matrices = matrices_of(self.model)
        costs = [newton_schulz_cost(p.shape) for p in self.matrices]
        self.dealt = balanced_partition(costs, self.world)

    def shard(self, model: nn.Module) -> nn.Module:
        return fsdp2_fully_shard(model, mesh=dist.init_device_mesh("cpu", (self.world,)))

    def give(self, gradients: list[torch.Tensor]) -> None:
        for p, gradient in zip(self.matrices, gradients, strict=True):
            start, stop = shard_rows(len(p), self.world, self.rank)
            p.grad = DTensor.from_local(
                gradient[start:stop].clone(),
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )

    @abstractmethod
    def step(self) -> None: ...

    def whole(self) -> list[torch.Tensor]:
        return [p.full_tensor().detach() for p in self.matrices]


class OneSided(Way):
    name = "one-sided"

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = Muon(self.matrices, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

    def shard(self, model: nn.Module) -> nn.Module:
        return fully_shard(model, backend="cpu")

    def step(self) -> None:
        self.optimizer.step()
        room = self.optimizer._room
        others = [shard for n in room.mine for owner, shard in enumerate(room._shards[n]) if owner != self.rank]
        self.bytes = 2 * sum(shard.nbytes for shard in others)  # read, and written back


class OnShards(Way):
    """Momentum and update by rows on FSDP2's shards; `results` makes this rank's rows of the orthogonal matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.momenta = [torch.zeros_like(p.to_local()) for p in self.matrices]

    @torch.no_grad()
    def step(self) -> None:
        self.bytes = 0
        updates = []
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            gradient = p.grad.to_local()
            momentum.lerp_(gradient, 1 - MOMENTUM)
            updates.append(gradient.lerp(momentum, MOMENTUM).bfloat16())
        for number, rows in self.results(updates):
            p = self.matrices[number]
            p.to_local().mul_(1 - LR * DECAY).add_(rows, alpha=-LR * max(1, p.shape[0] / p.shape[1]) ** 0.5)

    @abstractmethod
    def results(self, updates: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]: ...


class AllGather(OnShards):
    name = "all-gather"

    def results(self, updates: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        for number, update in enumerate(updates):
            sizes = [shard_rows(len(self.matrices[number]), self.world, rank) for rank in range(self.world)]
            shape = self.matrices[number].shape
            parts = [update.new_empty(stop - start, shape[1]) for start, stop in sizes]
            dist.all_gather(parts, update)
            self.bytes += update.nbytes * (self.world - 1)
            yield number, orthogonal(torch.cat(parts))[slice(*sizes[self.rank])]


class AllToAll(OnShards):
    name = "all-to-all"

    def results(self, updates: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        for bucket in self.buckets():
            mine = bucket[self.rank]
            received = self.exchange([[updates[n] for n in numbers] for numbers in bucket], self.rows(mine))
            wholes = [torch.cat([received[rank][at] for rank in range(self.world)]) for at in range(len(mine))]
            back = [self.split(orthogonal(whole)) for whole in wholes]
            sent = [[rows[rank] for rows in back] for rank in range(self.world)]
            shapes = [[updates[n].shape for n in numbers] for numbers in bucket]
            for numbers, rows in zip(bucket, self.exchange(sent, shapes), strict=True):
                yield from zip(numbers, rows, strict=True)

    def buckets(self) -> Iterator[list[list[int]]]:
        """By owner, the next matrices, until those of an owner have BUCKET_BYTES."""
        left = [list(numbers) for numbers in self.dealt]
        while any(left):
            bucket = []
            for numbers in left:
                taken: list[int] = []
                while numbers and sum(self.matrices[n].numel() * 2 for n in taken) < BUCKET_BYTES:
                    taken.append(numbers.pop(0))
                bucket.append(taken)
            yield bucket

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[slice(*shard_rows(len(whole), self.world, rank))] for rank in range(self.world)]

    def rows(self, numbers: list[int]) -> list[list[torch.Size]]:
        """By rank, the shapes of its rows of these matrices."""
        shapes = [
            [part.shape for part in self.split(torch.empty(self.matrices[n].shape, device="meta"))] for n in numbers
        ]
        return [[of[rank] for of in shapes] for rank in range(self.world)]

    def exchange(self, sent: list[list[torch.Tensor]], shapes: list[list[torch.Size]]) -> list[list[torch.Tensor]]:
        """One all-to-all: sends `sent`, by rank, and returns what came, of these `shapes` by rank."""
        flat = torch.cat([rows.reshape(-1) for of_rank in sent for rows in of_rank])
        counts = [sum(rows.numel() for rows in of_rank) for of_rank in sent]
        coming = [sum(shape.numel() for shape in of_rank) for of_rank in shapes]
        received = flat.new_empty(sum(coming))
        dist.all_to_all_single(received, flat, coming, counts)
        self.bytes += (sum(counts) - counts[self.rank]) * flat.itemsize
        parts = iter(received.split([shape.numel() for of_rank in shapes for shape in of_rank]))
        return [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]


class Floor(Way):
    name = "floor"

    def __init__(self) -> None:
        super().__init__()
        self.wholes = [torch.randn(self.matrices[n].shape) for n in self.dealt[self.rank]]

    def step(self) -> None:
        for whole in self.wholes:
            orthogonal(whole)


WAYS = (OneSided, AllToAll, AllGather, Floor)


def wanted(gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The weights that torch.optim.Muon makes of these gradients, by step, on whole matrices."""
    matrices = matrices_of(build())
    optimizer = torch.optim.Muon(matrices, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for step in gradients:
        for p, gradient in zip(matrices, step, strict=True):
            p.grad = gradient
        optimizer.step()
    return [p.detach() for p in matrices]


def gradients_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in matrices_of(build())]


def take_turns(ways: list[Way], gradients: list[torch.Tensor], round_: int) -> dict[str, dict[str, float]]:
    """By way, of one step of each: seconds, the largest share of them that a rank waited for a core, bytes sent."""
    found = {}
    for way in in_turn(ways, round_):
        way.give(gradients)
        dist.barrier()
        waited_s, start_s = quiet.waited_s(), time.monotonic()
        way.step()
        took = gather((time.monotonic() - start_s, quiet.waited_s() - waited_s, way.bytes))
        seconds, waits, sent = zip(*took, strict=True)
        found[way.name] = {
            "seconds": max(seconds),
            "waited": quiet.share(max(seconds), waits),
            "bytes": sum(sent),
        }
    return found


def measure(rounds: int) -> tuple[list[dict[str, dict[str, float]]], int]:
    """What `take_turns` finds, by round, and how many rounds were disturbed and taken anew. Collective."""
    open_job()
    ways = [kind() for kind in WAYS]
    gradients = [gradients_of(step) for step in range(CHECKED)]
    for step in range(CHECKED):
        take_turns(ways, gradients[step], step)
    want = wanted(gradients)
    for way in ways[:-1]:
        for got, value in zip(way.whole(), want, strict=True):
            torch.testing.assert_close(got, value, rtol=0, atol=1e-6)
    found, anew = [], 0
    while len(found) < rounds:
        turns = take_turns(ways, gradients[0], len(found) + anew)
        if anew < MOST_ANEW * rounds and any(of["waited"] > quiet.MOST_WAITING for of in turns.values()):
            anew += 1
            time.sleep(REST_S)
        else:
            found.append(turns)
    dist.destroy_process_group()
    return found, anew


def main() -> None:
    options = options_of(__doc__, ranks=2, rounds=30)
    single_thread_environment()
    found, anew = launch(measure, options.rounds, ranks=options.ranks)[0]
    seconds = {way.name: [turns[way.name]["seconds"] for turns in found] for way in WAYS}
    rows, ratios = [], {}
    for name, own in seconds.items():
        ratio = ratios[name] = bootstrap_ratio(own, seconds[OneSided.name])
        waited = statistics.median(turns[name]["waited"] for turns in found)
        rows.append(
            [
                name,
                f"{statistics.median(own):.3f}",
                f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
                f"{found[0][name]['bytes'] / 1e6:.1f}",
                f"{waited:.1%}",
            ]
        )
    print(table(rows, ("", "s per step", "of one-sided", "MB between ranks", "waited for a core")))
    print(f"{len(found)} rounds; {anew} more were taken anew, as a rank waited for a core")
    if options.out:
        sizes = {"ranks": options.ranks, "elements": sum(p.numel() for p in matrices_of(build()))}
        result = {"config": CONFIG, "ratios": ratios, "rounds": found, "taken_anew": anew}
        save_json(options.out, about() | sizes | result)


if __name__ == "__main__":
    main()
