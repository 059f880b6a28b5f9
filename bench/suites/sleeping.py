"""Simulated compute: layers sleep for as long as a cost model says, on the real engine with real ranks.

Parameters are a few numbers; barriers, hooks, locks, accumulation and the store are the library's. That lets many
ranks run on few cores: it measures waiting, not arithmetic.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc_triton.base.events import total_s
from odc_triton.engine.api import engine_of
from odc_triton.engine.minibatch import minibatch
from odc_triton.plan.entries import Segment
from odc_triton.plan.planner import SPLIT
from odc_triton.plan.segments import SplitPlan
from odc_triton.sequence.buffers import KVBuffers, LayerShape
from odc_triton.sequence.exchange import SequenceExchange, Span
from odc_triton.sequence.layer import LayerSplit, RowsOfOthers
from odc_triton.sequence.sync import HostSync
from odc_triton.sharding.shard_module import fully_shard

from ..harness import in_turn, open_job
from .cells import FORWARD_SHARE, Cell, Way, sizes_of

WIDTH = 8
OUTSIDE_ATTENTION = 0.5  # of a layer's time: half of it before attention, half after it
_LONGEST_WAIT_S = 300.0
_IN_A_WAVE = ("keys and values of", "gradients of")  # what a rank says that it waits for there


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One minibatch of one way on one rank; times are from the machine's monotonic clock, which ranks share."""

    cell: int
    way: int
    start_s: float
    end_s: float
    stalled_s: float = 0.0  # waiting for other ranks' segments: for flags inside of waves


class Gate:
    """A barrier of all ranks of one machine in well under a millisecond: it stands for a collective's waiting.

    Gloo's barrier takes log2(ranks) rounds of two threads each, which is slow if many ranks are on few cores; this one
    wakes rank 0 as ranks arrive and then every rank once. Collective: every rank of the process group creates one, then
    calls `wait` the same number of times. Raises TimeoutError if a rank does not come within five minutes,
    ConnectionError if one has died.
    """

    def __init__(self, name: str) -> None:
        """`name`: an abstract Unix socket's, the same on every rank, used by no other job."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._peers: list[socket.socket] = []
        address = f"\0odc-gate-{name}"
        if self.rank == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(address)
                listener.listen(self.world)
                dist.barrier()
                while len(self._peers) < self.world - 1:
                    listener.settimeout(_LONGEST_WAIT_S)
                    self._peers.append(listener.accept()[0])
        else:
            dist.barrier()
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(address)
            self._peers.append(peer)
        for peer in self._peers:
            # The kernel's deadline: Python's would make each `recv` two system calls.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_LONGEST_WAIT_S), 0))

    def wait(self) -> None:
        """Returns when all ranks have called it."""
        if self.rank != 0:
            self._peers[0].send(b"x")
        for peer in self._peers:
            if peer.recv(1) != b"x":
                raise ConnectionError(f"rank {self.rank}: a peer has left before the gate opened")
        if self.rank == 0:
            for peer in self._peers:
                peer.send(b"x")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class Sleeper:
    """Sleeps for the requested time in total: if one sleep lasts too long, the next is shorter.

    A sleep ends 0.1 ms late on an idle machine and some ms late on a busy one; sleeping less and spinning for the rest
    would take cores from the ranks that must wake.
    """

    def __init__(self) -> None:
        self.owed_s = 0.0

    def sleep(self, seconds: float) -> None:
        now = time.monotonic()
        until = now + seconds - self.owed_s
        if until > now:
            time.sleep(until - now)
        self.owed_s = time.monotonic() - until


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeper: Sleeper, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.sleeper, ctx.backward_s = sleeper, backward_s
        sleeper.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        ctx.sleeper.sleep(ctx.backward_s)
        return grad, None, None, None


class _Sums(torch.autograd.Function):
    """The sum of all keys and values; reads and adds as attention does."""

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, values: torch.Tensor, before: RowsOfOthers | None) -> torch.Tensor:
        ctx.before, ctx.shape = before, keys.shape
        read = (each.sum() for _, pair in (before.each() if before else ()) for each in pair)
        return sum(read, keys.sum() + values.sum())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if ctx.before is not None:
            rows = ctx.before.each(backward=True)
            ctx.before.add(((at, [gradient.expand_as(each) for each in pair]) for at, pair in rows), (True, True))
        return gradient.expand(ctx.shape), gradient.expand(ctx.shape), None


class SleepingLayer(nn.Module):
    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.sleeper = sleeper
        self.seconds = 0.0  # for the next microbatch's forward and backward
        self.side: LayerSplit | None = None
        self.spans: list[Span] = []  # the next microbatch's segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.spans:
            return self._sleep(self.linear(x), 1.0)
        # One key of one number for each token: what ranks wait for is real, what they move is small.
        y = self._sleep(self.linear(x), OUTSIDE_ATTENTION / 2)
        keys = (y[:, :1] * torch.zeros(1, self.spans[-1].end)).view(1, 1, -1, 1)
        keys, values = self.side.publish((keys, keys), self.spans)
        runs = self.side.runs(self.spans)
        before = RowsOfOthers(self.side, self.spans, runs, None, (keys.dtype, values.dtype)) if runs else None
        y = self._sleep(y + _Sums.apply(keys, values, before), 1 - OUTSIDE_ATTENTION)
        return self._sleep(y, OUTSIDE_ATTENTION / 2)

    def _sleep(self, x: torch.Tensor, part: float) -> torch.Tensor:
        share = FORWARD_SHARE * self.seconds * part
        return _Sleep.apply(x, self.sleeper, share, self.seconds * part - share)


class SleepingModel(nn.Module):
    """`layers` that sleep; `before_layer` runs before each, in forward and in backward."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.sleeper = Sleeper()
        self.layers = nn.ModuleList([SleepingLayer(self.sleeper) for _ in range(layers)])
        self.before_layer: Callable[[], None] = lambda: None
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: self.before_layer())
            layer.register_full_backward_pre_hook(lambda *_: self.before_layer())

    def forward(self, x: torch.Tensor, seconds: float, spans: Sequence[Span] = ()) -> torch.Tensor:
        for layer in self.layers:
            layer.seconds, layer.spans = seconds / len(self.layers), list(spans)
            x = layer(x)
        return x

    def enable_split(self, tokens: int) -> SequenceExchange:
        """What `enable_split` does for a transformers model. Collective."""
        engine = engine_of(self)
        shapes = [LayerShape(heads=1, widths=(1, 1), dtype="float32")] * len(self.layers)
        token = engine.exchange("enable_split", {"token": uuid.uuid4().hex})[0]["token"]
        token = f"{token}-{engine.grid.replica}"
        buffers = KVBuffers(engine.heap, shapes, tokens=tokens, token=token, timeout_s=engine.barrier.timeout_s)
        sync, streams = HostSync(buffers, engine), engine.streams.first.another()
        exchange = SequenceExchange(sync, streams, grid=engine.grid, in_order=False)
        engine.register(exchange)
        engine.streams.also(streams)
        engine.streams.watch(sync)
        for number, layer in enumerate(self.layers):
            layer.side = LayerSplit(exchange, number)
        return exchange


def _empty_s(model: SleepingModel, gate: Gate, repeats: int = 20) -> float:
    """Seconds of a minibatch without microbatches, the median: what its two barriers cost."""
    took = []
    for _ in range(repeats):
        gate.wait()
        start_s = time.monotonic()
        with minibatch(model, tokens=1):
            pass
        took.append(time.monotonic() - start_s)
    return statistics.median(took)


def run_cells(cells: Sequence[Cell], name: str) -> tuple[list[Ran], float]:
    """What a rank of the job does: all cells, each minibatch by every way in turn, in a rotating order. Collective.

    `name`: as for `Gate`. All cells have the same numbers of layers and hosts.
    """
    gate = Gate(name)
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["ODC_HOST"] = f"host-{rank * cells[0].hosts // world}"
    model = fully_shard(SleepingModel(cells[0].layers), backend="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, WIDTH, requires_grad=True)  # else torch skips the first layer's backward
    empty_s = _empty_s(model, gate)
    optimizer.step()
    split = [cell.split_tokens(world) for cell in cells if any(way.balance == SPLIT for way in cell.ways)]
    exchange = model.enable_split(max(split)) if split else None
    ran: list[Ran] = []

    def run(place: int, index: int, number: int) -> Ran:
        """One minibatch of one way, starting with a barrier."""
        cell, way = cells[place], cells[place].ways[number]
        lengths, job = cell.minibatches[index], cell.job(world, 0.0)
        assigned = cell.assigned(way, index, world)
        model.before_layer = gate.wait if way.schedule == "fsdp" else lambda: None
        model.sleeper.owed_s = 0.0
        gate.wait()
        start_s = time.monotonic()
        plan = SplitPlan.of(assigned, replicas=cell.hosts) if way.balance == SPLIT else None
        with minibatch(model, tokens=len(lengths) if rank == 0 else 0, split=plan) as mb:
            for members in assigned[rank]:
                sizes = sizes_of(members, lengths)
                (model(x, job.pack_seconds(sizes), spans_of(exchange, sizes)).sum() / mb.tokens).backward()
        end_s = time.monotonic()
        optimizer.step()
        waits = [each for each in engine_of(model).events.drain() if each.label.startswith(_IN_A_WAVE)]
        return Ran(cell=place, way=number, start_s=start_s, end_s=end_s, stalled_s=total_s(waits, "wait"))

    for place, cell in enumerate(cells):
        for index in range(len(cell.minibatches)):
            for number in in_turn(range(len(cell.ways)), index):
                ran.append(run(place, index, number))
    gate.close()
    return ran, empty_s


def spans_of(exchange: SequenceExchange | None, sizes: Sequence[int | Segment]) -> list[Span]:
    """The segments of a pack of such documents in which other ranks have a part."""
    segments = [each if isinstance(each, Segment) else None for each in sizes]
    if exchange is None or not any(segments):
        return []
    ends = accumulate(len(each) if isinstance(each, Segment) else each for each in sizes)
    return exchange.spans([0, *ends], segments)


def main_of_rank(cells: Sequence[Cell], name: str) -> tuple[list[Ran], float]:
    """`run_cells` in a process that the launcher started."""
    open_job()
    try:
        return run_cells(cells, name)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way's minibatches of one cell, in order; seconds. `stall`: the share of all ranks' time in which they wait
    for flags inside of waves.
    """

    cell: Cell
    way: Way
    seconds: list[float]
    simulated: list[float]
    mean_work: list[float]  # sum of all packs / ranks: no balance can be faster
    stall: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds)

    @property
    def off(self) -> float:
        """The simulation over the measurement, less 1."""
        return sum(self.simulated) / self.total - 1


def together(cells: Sequence[Cell], of_ranks: Sequence[Sequence[Ran]], empty_s: float) -> list[Measured]:
    """What `run_cells` returned on every rank, by cell and way, with the simulation, which gets `empty_s`."""
    results = []
    for place, cell in enumerate(cells):
        for number, way in enumerate(cell.ways):
            every = zip(*of_ranks, strict=True)  # all ranks ran them in the same order
            minibatches = [ran for ran in every if (ran[0].cell, ran[0].way) == (place, number)]
            seconds = [max(r.end_s for r in m) - min(r.start_s for r in m) for m in minibatches]
            results.append(
                Measured(
                    cell=cell,
                    way=way,
                    seconds=seconds,
                    simulated=cell.simulated_s(way, len(of_ranks), empty_s),
                    mean_work=[cell.even_share_s(index, len(of_ranks)) for index in range(len(seconds))],
                    stall=sum(r.stalled_s for m in minibatches for r in m) / (len(of_ranks) * sum(seconds)),
                )
            )
    return results
