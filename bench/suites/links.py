"""gather, scatter, linear and wgrad over the links of a machine: two processes for every two GPUs, one pair at a time.

    python -m bench.suites.links [--backend auto|cuda|cpu-apart] [--rows 8192] [--columns 8192] [--tokens 4096]
                          [--seconds 1] [--out out/links]

Memory is torch's symmetric memory as the engine opens it, weights bf16, sums of gradients fp32. Results are checked
first, exactly: all numbers are small integers. Then one rank calls while the other is idle. In a world of two, half of
each tensor is the caller's own, and only the other half crosses the link and counts for GB/s. "copy" is the copy
engine, with which the engine gathers; "gather" is the kernel. Prints a matrix for each operator next to the topology's
nominal rates, and keeps links.json and links.md up to date while it runs.

Without two GPUs the CPU's heap (cpu-apart) is used, for the control flow only: copies, and additions under locks.
"""

from __future__ import annotations

import argparse
import gc
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc_triton.base.files import write_file
from odc_triton.comm.launch import launch
from odc_triton.comm.layout import Region, aligned
from odc_triton.comm.local_store import rendezvous_url
from odc_triton.comm.memory import ApartHeap, CudaHeap, SymmetricHeap
from odc_triton.engine.gradients import LockedAccumulator, Target
from odc_triton.engine.streams import Streams
from odc_triton.machine.probe import read_topology
from odc_triton.machine.topology import Topology
from odc_triton.machine.unusable import unusable_pairs

from ..device import Gpu, Rehearsal
from ..provenance import about, save_json
from .links_report import Call, Link, as_data, text_of

TIMEOUT_S = 120.0
FEW_TOKENS = 16  # for the strategy `direct`, which is meant for few


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer [rows, columns], its tokens. `loops`: how often additions are checked; `seconds`: for each timing."""

    rows: int = 8192
    columns: int = 8192
    tokens: int = 4096
    loops: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "tokens"):
            value = getattr(self, name)
            if value < 16 or value % 16:  # rows of half the ranks stay aligned, additions of integers exact
                raise ValueError(f"{name} is {value}; give a multiple of 16")
        if self.loops < 1:
            raise ValueError(f"loops is {self.loops}; give at least 1")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}; it must be positive and finite")

    @property
    def weight(self) -> Region:
        return Region(shape=(self.rows, self.columns), dtype="bfloat16", itemsize=2, offset_bytes=0)

    @property
    def gradient(self) -> Region:
        first = aligned(self.rows // 2 * self.columns * 2)
        return Region(shape=(self.rows, self.columns), dtype="float32", itemsize=4, offset_bytes=first)

    @property
    def part_bytes(self) -> int:
        """The heap's bytes on each rank."""
        return self.gradient.offset_bytes + self.rows // 2 * self.columns * 4


def integers(rows: int, columns: int, seed: int, device: torch.device) -> torch.Tensor:
    """[rows, columns] of -3 to 3 in fp32, the same wherever it is made."""
    return torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(seed)).float().to(device)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What a rank calls, and the bytes that one call moves over the link. `added`: what a rank's call adds to all rows
    of the sums; `made`, for an operator that reads: its result and what that should be.
    """

    run: Callable[[], Any]
    link_bytes: int
    added: Callable[[int], torch.Tensor] | None = None
    made: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None


Operators = dict[str, Operator]


def _whole_weight(shape: Shape, device: torch.device) -> torch.Tensor:
    halves = [integers(shape.rows // 2, shape.columns, owner, device) for owner in range(2)]
    return torch.cat(halves).bfloat16()


def copies(shape: Shape, heap: SymmetricHeap) -> Operators:
    """Operators that need no kernel: gathering by copies."""
    device = heap.device
    shards = [heap.shard(shape.weight, owner) for owner in range(2)]
    out = torch.empty(shape.rows, shape.columns, dtype=torch.bfloat16, device=device)
    halves = out.split(shape.rows // 2)

    def copy() -> None:
        for step in range(2):  # this rank's shard first, as in engine/gathered.py
            owner = (heap.rank + step) % 2
            halves[owner].copy_(shards[owner], non_blocking=True)

    link_bytes = shape.rows // 2 * shape.columns * 2
    return {"copy": Operator(run=copy, link_bytes=link_bytes, made=lambda: (out, _whole_weight(shape, device)))}


def on_cpu(shape: Shape, heap: ApartHeap) -> Operators:
    target = Target(slot=0, shards=[heap.shard(shape.gradient, owner) for owner in range(2)], rank=heap.rank)
    accumulator = LockedAccumulator(heap, Streams(), TIMEOUT_S)
    gradient = integers(shape.rows, shape.columns, 10 + heap.rank, heap.device)
    scatter = Operator(
        run=lambda: accumulator.add(gradient, target, name="the gradient", waited=lambda _: None),
        link_bytes=shape.rows // 2 * shape.columns * 4,
        added=lambda rank: integers(shape.rows, shape.columns, 10 + rank, heap.device),
    )
    return copies(shape, heap) | {"scatter": scatter}


def peers_of(shape: Shape, heap: SymmetricHeap) -> tuple[Any, Any]:
    """The weight and the sums as kernels see them: the other rank's rows cross the link."""
    from odc_kernels.peers import PeerShards

    near = frozenset({heap.rank})
    return tuple(
        PeerShards.of([heap.shard(each, owner) for owner in range(2)], shape=each.shape, rank=heap.rank, near=near)
        for each in (shape.weight, shape.gradient)
    )


def on_gpu(shape: Shape, heap: CudaHeap) -> Operators:
    from odc_kernels.gather import gather
    from odc_kernels.linear import linear
    from odc_kernels.linear_staged import linear_staged
    from odc_kernels.scatter import scatter
    from odc_kernels.streams import device_of
    from odc_kernels.wgrad import wgrad

    from ..kernels.products import Pulled

    device, rank = heap.device, heap.rank
    weight, sums = peers_of(shape, heap)
    whole = torch.empty(shape.rows, shape.columns, dtype=torch.bfloat16, device=device)
    x = integers(shape.tokens, shape.columns, 20 + rank, device).bfloat16()
    few = x[:FEW_TOKENS].contiguous()
    y, y_few = (torch.empty(len(of), shape.rows, dtype=torch.bfloat16, device=device) for of in (x, few))
    gradient = integers(shape.rows, shape.columns, 10 + rank, device).bfloat16()
    dy = integers(shape.tokens, shape.rows, 30 + rank, device).bfloat16()
    pulled = Pulled(weight)

    def product(of: torch.Tensor) -> torch.Tensor:
        # Integers: fp32 holds every sum, so this and ours differ by at most one rounding to bf16.
        return (of.float() @ _whole_weight(shape, device).float().t()).bfloat16()

    def weight_gradient(of: int) -> torch.Tensor:
        theirs = [
            integers(shape.tokens, size, seed + of, device) for size, seed in ((shape.rows, 30), (shape.columns, 20))
        ]
        return theirs[0].t() @ theirs[1]

    on = device_of(whole)
    aside = None if on is None else on.stream()

    def at_once() -> None:
        """Additions of both kinds into the same memory, from both ranks; one after the other in the interpreter."""
        scattered = partial(scatter, gradient=gradient, peers=sums)
        if on is None:
            scattered()
        else:
            aside.wait_stream(on.current())
            on.enqueue(aside, scattered)
        wgrad(dy=dy, x=x, weight=sums)
        if on is not None:
            on.current().wait_stream(aside)

    def scattered_gradient(of: int) -> torch.Tensor:
        return integers(shape.rows, shape.columns, 10 + of, device)

    reads = partial(Operator, link_bytes=shape.rows // 2 * shape.columns * 2)
    adds = partial(Operator, link_bytes=shape.rows // 2 * shape.columns * 4)
    near = replace(sums, near=frozenset({0, 1}))  # as if on one GPU: adds in bulk
    return copies(shape, heap) | {
        "gather": reads(
            run=lambda: gather(peers=weight, out=whole), made=lambda: (whole, _whole_weight(shape, device))
        ),
        "linear direct": reads(run=lambda: linear(x=few, weight=weight, out=y_few), made=lambda: (y_few, product(few))),
        "linear staged": reads(run=lambda: linear_staged(x=x, weight=pulled(), out=y), made=lambda: (y, product(x))),
        "scatter": adds(run=lambda: scatter(gradient=gradient, peers=sums), added=scattered_gradient),
        "wgrad": adds(run=lambda: wgrad(dy=dy, x=x, weight=sums), added=weight_gradient),
        "wgrad in bulk": adds(run=lambda: wgrad(dy=dy, x=x, weight=near), added=weight_gradient),
        "both at once": Operator(
            run=at_once,
            link_bytes=shape.rows * shape.columns * 4,
            added=lambda of: weight_gradient(of) + scattered_gradient(of),
        ),
    }


def measure_pair(shape: Shape, devices: tuple[int, int] | None, token: str) -> dict[str, Call]:
    """Runs on each of two ranks; returns what it measured with the other's memory. Collective.

    `devices`: CUDA's numbers of the ranks' GPUs, None for the CPU's heap. `token`: a name that only this pair knows.
    Raises RuntimeError if a result is wrong.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", rendezvous_url(), timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    given = {"rank": rank, "world": 2, "size_bytes": shape.part_bytes, "token": token, "timeout_s": TIMEOUT_S}
    if devices is None:
        torch.set_num_threads(1)
        heap: Any = ApartHeap(slots=1, **given)
        synchronize: Callable[[], None] = lambda: None  # noqa: E731
    else:
        torch.cuda.set_device(devices[rank])  # before bench.kernels.operators is imported: it takes the current one
        heap = CudaHeap(group=dist.group.WORLD, **given)
        synchronize = torch.cuda.synchronize
    heap.shard(shape.weight, rank).copy_(integers(shape.rows // 2, shape.columns, rank, heap.device))
    operators = on_cpu(shape, heap) if devices is None else on_gpu(shape, heap)

    def meet() -> None:
        synchronize()
        dist.barrier()

    meet()
    for name, wrong in _wrong_results(shape, heap, operators, meet):
        raise RuntimeError(f"{name} between {devices or 'two processes'}: {wrong} numbers are wrong on rank {rank}")
    found: dict[str, Call] = {}
    for turn in range(2):
        meet()
        if rank == turn:
            runs = {name: operator.run for name, operator in operators.items()}
            us = _times(runs, shape.seconds * len(runs), Rehearsal() if devices is None else Gpu())
            found = {name: Call(us=us[name], link_bytes=operators[name].link_bytes) for name in us}
            del runs
    meet()  # no memory is freed while it is still read
    del operators, heap
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return found


def _wrong_results(
    shape: Shape, heap: SymmetricHeap, operators: Operators, meet: Callable[[], None]
) -> Iterator[tuple[str, int]]:
    """Runs every operator once, all additions of both ranks at the same time."""
    for name, operator in operators.items():
        if operator.made is not None:
            operator.run()
            got, want = operator.made()
            if wrong := int((got != want).sum()):
                yield name, wrong
    for name, operator in [(name, each) for name, each in operators.items() if each.added is not None] * shape.loops:
        sums = heap.shard(shape.gradient, heap.rank)
        sums.zero_()
        meet()
        operator.run()
        meet()
        first = heap.rank * shape.rows // 2
        want = sum(operator.added(rank)[first : first + shape.rows // 2] for rank in range(2))
        if wrong := int((sums != want).sum()):
            yield name, wrong
        meet()


def _times(run: dict[str, Callable[[], Any]], seconds: float, device: Gpu) -> dict[str, dict[str, float]]:
    from ..kernels.timing import interleaved, quantiles

    return {name: quantiles(us) for name, us in interleaved(run, device, seconds=seconds).items()}


@dataclass(frozen=True, kw_only=True)
class PairOfGpus:
    """Two ends to measure between. `devices`: CUDA's numbers; None on the CPU. `refused`: why it can't be measured."""

    names: tuple[str, str]
    devices: tuple[int, int] | None
    kind: str
    nominal_gb_s: float | None
    refused: str | None = None


def pairs_of(topology: Topology) -> list[PairOfGpus]:
    """All pairs of GPUs that this process sees."""
    reasons = {bad.pair: bad.reason for bad in unusable_pairs(topology)}
    return [
        PairOfGpus(
            names=(pair.one.label, pair.other.label),
            devices=(pair.one.cuda_index, pair.other.cuda_index),
            kind=pair.kind,
            nominal_gb_s=pair.gbs,
            refused=reasons.get(pair),
        )
        for pair in topology.pairs
        if pair.one.cuda_index is not None and pair.other.cuda_index is not None
    ]


ON_CPU = PairOfGpus(names=("process 0", "process 1"), devices=None, kind="shared memory", nominal_gb_s=None)


def measure_links(
    pairs: Sequence[PairOfGpus],
    measure: Callable[[PairOfGpus], list[dict[str, Call]]],
    so_far: Callable[[list[Link]], None],
) -> list[Link]:
    """Both directions of every pair; one that can't be measured is a link with the reason. `so_far` gets all links."""
    links: list[Link] = []
    for pair in pairs:
        failure, by_rank = pair.refused, [{}, {}]
        if failure is None:
            try:
                by_rank = measure(pair)
            except RuntimeError as error:
                failure = " ".join(str(error).split())
        for calls, worker, owner in zip(by_rank, pair.names, reversed(pair.names), strict=True):
            about = {"kind": pair.kind, "nominal_gb_s": pair.nominal_gb_s}
            links.append(Link(worker=worker, owner=owner, calls=calls, failure=failure, **about))
        so_far(links)
    return links


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 if every usable pair was measured and gave right results, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.suites.links", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("auto", "cuda", "cpu-apart"), default="auto")
    for name, kind in (("rows", int), ("columns", int), ("tokens", int), ("loops", int), ("seconds", float)):
        default = getattr(Shape(), name)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default: {default}")
    parser.add_argument("--out", type=Path, default=Path("out/links"), help="folder of links.json and links.md")
    options = parser.parse_args(words)
    try:
        shape = Shape(**{field.name: getattr(options, field.name) for field in fields(Shape)})
    except ValueError as error:
        parser.error(str(error))
    pairs = [] if options.backend == "cpu-apart" else pairs_of(read_topology())
    if options.backend == "cuda" and not pairs:
        parser.error("--backend cuda needs two GPUs that this process sees; `odc-triton topo` shows them")
    if not pairs:
        pairs = [ON_CPU]
        print(
            "Two processes on the CPU: this tries the control flow, and its figures say nothing of links.", flush=True
        )
    options.out.mkdir(parents=True, exist_ok=True)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    said = {"shape": asdict(shape), **about(), "gpus": names}

    def measure(pair: PairOfGpus) -> list[dict[str, Call]]:
        return launch(measure_pair, shape, pair.devices, f"links-{uuid.uuid4().hex}", ranks=2)

    def so_far(links: list[Link]) -> None:
        save_json(options.out / "links.json", as_data(links, said))
        lines = [text_of(links), "", *(f"- {key}: {value}" for key, value in said.items())]
        write_file(options.out / "links.md", ("\n".join(lines) + "\n").encode())
        last = links[-1]
        print(f"  {last.worker} and {last.owner}: {last.failure or 'measured'}", flush=True)

    links = measure_links(pairs, measure, so_far)
    print(f"\n{text_of(links)}\n\nwritten to {options.out}: links.json, links.md")
    usable = {name for pair in pairs if pair.refused is None for name in (pair.names, pair.names[::-1])}
    return 0 if usable and all(link.calls for link in links if (link.worker, link.owner) in usable) else 1


if __name__ == "__main__":
    sys.exit(main())
