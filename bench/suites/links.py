"""Reads, additions and products over a machine's links, compared with plain copies, NCCL and torch's fused product.

    python -m bench.suites.links [--pairs one-per-kind|all] [--backend auto|cuda|cpu-sharded] [--sizes 65536 ...]
                          [--columns 8192] [--tokens 4096] [--loops 1] [--out out/links]

One pair of GPUs per kind of link (NV#, PIX, PXB, PHB, SYS) comes first, then all GPUs at once, the library's pattern;
with `--pairs all` the other pairs follow. Every GPU is a process with shards of a weight in bf16 and of sums in fp32,
in torch's symmetric memory as the engine opens it. A size is the bytes of one owner's weight; sums have twice as many.

Results are checked first, exactly: all numbers are small integers. Then all ranks call at the same time, several times
in a row, and GB/s are what one rank reads from the others or adds to them. Each cell is a line of links.jsonl as soon
as it is measured, so a killed run keeps what it had; links.md has the tables.

Without two GPUs the CPU's heap (cpu-sharded) is used, for the control flow only: copies, and additions under locks.
"""

from __future__ import annotations

import argparse
import gc
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc_triton.base.files import write_file
from odc_triton.comm.layout import Region, aligned
from odc_triton.comm.memory.cuda import CudaHeap
from odc_triton.comm.memory.heap import ApartHeap, SymmetricHeap
from odc_triton.comm.process_group import rendezvous_url
from odc_triton.engine.transport import LockedTransport, Streams, Target
from odc_triton.jobs.launcher.launch import launch
from odc_triton.machine.probe import read_topology

from ..device import Gpu, Rehearsal
from ..provenance import about, append_line, read_lines
from .links_places import ON_CPU, Place, places_of
from .links_report import size_of, text_of

LINES = "links.jsonl"
# Renamed in torch 2.13; FSDP2 itself calls the one that exists.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
SIZES = tuple(4**power << 16 for power in range(7))  # 64 KiB to 256 MiB
TIMEOUT_S = 120.0
CALLS = 20  # in a row, so that ranks which start some microseconds apart still share the links


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A weight whose owners have `own_bytes` each, in rows of `columns`; how often additions to it are checked."""

    own_bytes: int
    world: int
    columns: int = 8192
    tokens: int = 4096
    loops: int = 1

    def __post_init__(self) -> None:
        row = 2 * self.columns
        for name, multiple in (("columns", 16), ("tokens", 16), ("loops", 1)):
            value = getattr(self, name)
            if value < 1 or value % multiple:  # rows stay aligned
                raise ValueError(f"{name} is {value}; give a multiple of {multiple}")
        if self.own_bytes < 1 or self.own_bytes % row:
            raise ValueError(f"a size is {self.own_bytes}; give a multiple of {row}, the bytes of a row")

    @property
    def own_rows(self) -> int:
        return self.own_bytes // (2 * self.columns)

    @property
    def rows(self) -> int:
        return self.own_rows * self.world

    @property
    def weight(self) -> Region:
        return Region(shape=(self.rows, self.columns), dtype="bfloat16", itemsize=2, offset_bytes=0)

    @property
    def sums(self) -> Region:
        start = aligned(self.own_bytes)
        return Region(shape=(self.rows, self.columns), dtype="float32", itemsize=4, offset_bytes=start)

    @property
    def crossed_bytes(self) -> int:
        """What a rank reads from all others; it adds twice as much."""
        return (self.world - 1) * self.own_bytes

    def own(self, rank: int) -> slice:
        return slice(rank * self.own_rows, (rank + 1) * self.own_rows)

    @property
    def heap_bytes(self) -> int:
        return self.sums.offset_bytes + 2 * self.own_bytes

    def integers(self, rows: int, columns: int, seed: int, device: torch.device) -> torch.Tensor:
        """[rows, columns] of -3 to 3 in fp32, the same on every rank."""
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randint(-3, 4, (rows, columns), generator=generator, device=device).float()


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What a rank calls, and the bytes that one call moves over its links. `added`: what a rank's call adds to this
    rank's sums; `made`, for one that reads: its result and what that should be; neither: torch's own, may fail.
    """

    run: Callable[[], Any]
    link_bytes: int
    added: Callable[[int], torch.Tensor] | None = None
    made: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None


def _whole_weight(layer: Layer, device: torch.device) -> torch.Tensor:
    owners = range(layer.world)
    return torch.cat([layer.integers(layer.own_rows, layer.columns, of, device).bfloat16() for of in owners])


def _plain(layer: Layer, heap: SymmetricHeap, group: dist.ProcessGroup) -> dict[str, Operator]:
    """What needs no kernel of ours: copies from peers, in the engine's order, and collectives."""
    device, world = heap.device, layer.world
    shards = [heap.shard(layer.weight, owner) for owner in range(world)]
    out = torch.empty(layer.rows, layer.columns, dtype=torch.bfloat16, device=device)
    parts = out.split(layer.own_rows)
    gradient = torch.zeros(layer.rows, layer.columns, device=device)

    def copy() -> None:
        for step in range(world):
            owner = (heap.rank + step) % world
            parts[owner].copy_(shards[owner], non_blocking=True)

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        return out, _whole_weight(layer, device)

    gather = partial(ALL_GATHER, out, shards[heap.rank], group=group)
    reduce = partial(REDUCE_SCATTER, torch.empty_like(gradient[: layer.own_rows]), gradient, group=group)
    name = dist.get_backend(group)
    return {
        "peer copies": Operator(run=copy, link_bytes=layer.crossed_bytes, made=made),
        f"{name} all_gather": Operator(run=gather, link_bytes=layer.crossed_bytes, made=made),
        f"{name} reduce_scatter": Operator(run=reduce, link_bytes=2 * layer.crossed_bytes),
    }


def on_cpu(layer: Layer, heap: ApartHeap, group: dist.ProcessGroup) -> dict[str, Operator]:
    target = Target(number=0, shards=[heap.shard(layer.sums, owner) for owner in range(layer.world)], rank=heap.rank)
    accumulator = LockedTransport(heap, Streams(), TIMEOUT_S)
    gradient = layer.integers(layer.rows, layer.columns, 10 + heap.rank, heap.device)
    own = layer.own(heap.rank)
    scatter = Operator(
        run=lambda: accumulator.add(gradient, target, name="the gradient", waited=lambda _: None),
        link_bytes=2 * layer.crossed_bytes,
        added=lambda of: layer.integers(layer.rows, layer.columns, 10 + of, heap.device)[own],
    )
    return _plain(layer, heap, group) | {"scatter": scatter}


def peers_of(layer: Layer, heap: SymmetricHeap) -> tuple[Any, Any]:
    """The weight and the sums as kernels see them: all other ranks' rows cross a link."""
    from odc_kernels.peers import PeerShards

    near, owners = frozenset({heap.rank}), range(layer.world)
    return tuple(
        PeerShards.of([heap.shard(each, owner) for owner in owners], shape=each.shape, rank=heap.rank, near=near)
        for each in (layer.weight, layer.sums)
    )


def by_kernels(layer: Layer, heap: SymmetricHeap) -> dict[str, Operator]:
    from odc_kernels.ops import gather, linear, linear_staged, scatter, wgrad
    from odc_kernels.streams import device_of

    from ..kernels.products import Pulled

    device, rank = heap.device, heap.rank
    weight, sums = peers_of(layer, heap)
    near = replace(sums, near=frozenset(range(layer.world)))  # as if all were on one GPU: added in bulk
    own = layer.own(rank)
    whole = torch.empty(layer.rows, layer.columns, dtype=torch.bfloat16, device=device)
    x = layer.integers(layer.tokens, layer.columns, 200 + rank, device).bfloat16()
    few = x[:16].contiguous()  # tokens, for which `linear` is meant
    y, y_few = (torch.empty(len(of), layer.rows, dtype=torch.bfloat16, device=device) for of in (x, few))
    gradient = layer.integers(layer.rows, layer.columns, 100 + rank, device).bfloat16()
    dy = layer.integers(layer.tokens, layer.rows, 300 + rank, device).bfloat16()
    pulled, wanted = Pulled(weight), partial(_whole_weight, layer, device)

    def product(of: torch.Tensor) -> torch.Tensor:
        # Integers: fp32 holds every sum, so this and ours are rounded to bf16 alike.
        return (of.float() @ wanted().float().t()).bfloat16()

    def weight_gradient(of: int) -> torch.Tensor:
        theirs = layer.integers(layer.tokens, layer.rows, 300 + of, device)[:, own]
        return theirs.t() @ layer.integers(layer.tokens, layer.columns, 200 + of, device)

    def scattered_gradient(of: int) -> torch.Tensor:
        return layer.integers(layer.rows, layer.columns, 100 + of, device)[own]

    on = device_of(whole)
    aside = None if on is None else on.stream()

    def at_once() -> None:
        """Additions of both kinds into the same memory; one after the other in the interpreter."""
        scattered = partial(scatter, gradient=gradient, peers=sums)
        if on is None:
            scattered()
        else:
            aside.wait_stream(on.current())
            on.enqueue(aside, scattered)
        wgrad(dy=dy, x=x, weight=sums)
        if on is not None:
            on.current().wait_stream(aside)

    reads, adds = (partial(Operator, link_bytes=times * layer.crossed_bytes) for times in (1, 2))
    return {
        "gather": reads(run=lambda: gather(peers=weight, out=whole), made=lambda: (whole, wanted())),
        "linear direct": reads(run=lambda: linear(x=few, weight=weight, out=y_few), made=lambda: (y_few, product(few))),
        "linear staged": reads(run=lambda: linear_staged(x=x, weight=pulled(), out=y), made=lambda: (y, product(x))),
        "scatter": adds(run=lambda: scatter(gradient=gradient, peers=sums), added=scattered_gradient),
        "wgrad": adds(run=lambda: wgrad(dy=dy, x=x, weight=sums), added=weight_gradient),
        "wgrad in bulk": adds(run=lambda: wgrad(dy=dy, x=x, weight=near), added=weight_gradient),
        "both at once": replace(
            adds(run=at_once, added=lambda of: weight_gradient(of) + scattered_gradient(of)),
            link_bytes=4 * layer.crossed_bytes,
        ),
    }


def _on_gpu(layer: Layer, heap: CudaHeap, group: dist.ProcessGroup) -> dict[str, Operator]:
    plain, ours = _plain(layer, heap, group), by_kernels(layer, heap)
    shard = heap.shard(layer.weight, heap.rank).clone()
    x_t = layer.integers(layer.columns, layer.tokens, 200 + heap.rank, heap.device).bfloat16()
    fused = partial(torch.ops.symm_mem.fused_all_gather_matmul, shard, [x_t], 0, group.group_name)
    theirs = Operator(run=fused, link_bytes=layer.crossed_bytes)
    return plain | ours | {"fused_all_gather_matmul": theirs}


def measure_place(place: Place, layers: Sequence[Layer], token: str, lines: Path) -> None:
    """Runs on each rank; rank 0 appends a line per cell. `token`: a name that only these ranks know.

    Collective. Raises RuntimeError if a result is wrong.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", rendezvous_url(), timeout=timedelta(seconds=TIMEOUT_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    given = {"rank": rank, "world": world, "token": token, "timeout_s": TIMEOUT_S}
    given["size_bytes"] = max(layer.heap_bytes for layer in layers)
    if place.devices:
        # Before bench.kernels.products is imported, which takes the current one.
        torch.cuda.set_device(place.devices[rank])
        heap: Any = CudaHeap(group=dist.group.WORLD, **given)
        group, device, make = dist.new_group(backend="nccl"), Gpu(), _on_gpu
    else:
        torch.set_num_threads(1)
        heap = ApartHeap(locks=1, **given)
        group, device, make = dist.group.WORLD, Rehearsal(), on_cpu

    def sync() -> None:
        device.synchronize()
        dist.barrier()

    for layer in layers:
        heap.shard(layer.weight, rank).copy_(layer.integers(layer.own_rows, layer.columns, rank, heap.device))
        operators = make(layer, heap, group)
        sync()
        for name, operator in operators.items():
            checked = operator.made or operator.added
            for wrong in wrong_results(layer, heap, operator, sync) if checked else ():
                raise RuntimeError(f"{name} between {', '.join(place.names)}: {wrong} numbers are wrong on rank {rank}")
            told: list[list[float]] = [[]] * world
            try:
                mine = _us(operator.run, device, sync)
            except RuntimeError as error:
                if checked:
                    raise
                mine = []
                print(f"{name} of {size_of(layer.own_bytes)}: {error}", flush=True)
            dist.all_gather_object(told, mine)
            if rank == 0:
                us = sorted(us for each in told for us in each)
                cell = {"operator": name, "size": layer.own_bytes, "link_bytes": operator.link_bytes, "us": us}
                append_line(lines, {"place": asdict(place), **cell})
        del operators, operator
        gc.collect()
        sync()  # no memory is overwritten while it is still read
    del heap
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _us(run: Callable[[], Any], device: Gpu, sync: Callable[[], None]) -> list[float]:
    """Microseconds of a call, one number for each round."""
    marks = []
    for _ in range(device.rounds[0]):
        sync()
        begin = device.mark()
        for _ in range(CALLS):
            run()
        marks.append((begin, device.mark()))
    sync()
    return [device.us_between(*each) / CALLS for each in marks]


def wrong_results(layer: Layer, heap: SymmetricHeap, operator: Operator, sync: Callable[[], None]) -> Iterator[int]:
    """How many numbers are wrong, if any, when all ranks call at the same time."""
    for _ in range(layer.loops if operator.added else 1):
        sums = heap.shard(layer.sums, heap.rank).zero_()
        sync()
        operator.run()
        sync()
        got, want = operator.made() if operator.made else (sums, sums)
        if operator.added:
            want = sum(operator.added(rank) for rank in range(layer.world))
        if wrong := int((got != want).sum()):
            yield wrong


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 if every usable place was measured and gave right results, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.suites.links", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", choices=("one-per-kind", "all"), default="one-per-kind")
    parser.add_argument("--backend", choices=("auto", "cuda", "cpu-sharded"), default="auto")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes; default: 64 KiB to 256 MiB")
    for name in ("columns", "tokens", "loops"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Layer, name), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/links"), help=f"folder of {LINES} and links.md")
    options = parser.parse_args(words)
    given = {name: getattr(options, name) for name in ("columns", "tokens", "loops")}
    try:
        layers = [Layer(own_bytes=size, world=2, **given) for size in sorted(options.sizes)]
    except ValueError as error:
        parser.error(str(error))
    places = [] if options.backend == "cpu-sharded" else places_of(read_topology(), every_pair=options.pairs == "all")
    if options.backend == "cuda" and not places:
        parser.error("--backend cuda needs two GPUs that this process sees; `odc-triton doctor` counts them")
    if not places:
        places = [ON_CPU]
        print("Two processes on the CPU: this tries the control flow, and its figures say nothing of links.")
        print("On a machine with several GPUs run `python -m bench.suites.links`.", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / LINES
    lines.unlink(missing_ok=True)
    append_line(lines, {"about": {**given, **about(), "gpu": Gpu().about()}})
    failed = False
    for place in places:
        failure = place.refused
        if failure is None:
            here = [replace(layer, world=len(place.names)) for layer in layers]
            try:
                launch(measure_place, place, here, f"links-{uuid.uuid4().hex}", lines, ranks=len(place.names))
            except RuntimeError as error:
                failure, failed = " ".join(str(error).split()), True
        if failure is not None:
            append_line(lines, {"place": asdict(place), "failure": failure})
        write_file(options.out / "links.md", text_of(read_lines(lines)).encode())
        print(f"  {', '.join(place.names)} ({place.kind}): {failure or 'measured'}", flush=True)
    print(f"\n{text_of(read_lines(lines))}\nwritten to {options.out}: {LINES}, links.md")
    return 1 if failed or all(place.refused for place in places) else 0


if __name__ == "__main__":
    sys.exit(main())
