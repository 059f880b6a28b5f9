"""CPU time that each way to shard takes of the host, where tensors are too small to count: no GPU is needed.

    python -m bench.suites.host_time [--rounds 60] [--out bench/results/host_time.json]

A model of 24 tiny units with 120 parameters. In each round all ways in turn run a minibatch of a few microbatches, clip
and step, and each round gives one ratio to FSDP2. Times are of the thread that computes, forward and backward: neither
waits for other ranks count, nor gloo's threads, nor time in which others had the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from odc_kernels.streams import CudaDevice
from odc_triton.comm.memory.heap import ApartHeap
from odc_triton.engine.minibatch import minibatch
from odc_triton.engine.transport import DeviceStreams, Streams
from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import table
from odc_triton.nn.replace import replace_layers
from odc_triton.sharding.backend import BACKENDS, CpuBackend
from odc_triton.sharding.shard_module import fully_shard

from ..harness import gather, in_turn, median_ratio, open_job, single_thread_environment
from ..provenance import about, options_of, save_parts

UNITS, WIDTH, ROWS = 24, 16, 4
MICROBATCHES, WARM_UP = 4, 5
PLAIN, FSDP2, GATHERED = "plain torch", "FSDP2", "cpu-at-once"
PARTS = ("microbatch", "clip", "step", "clip and step", "entry and exit")  # the last: of a minibatch; FSDP2 has none
COLUMNS = ("ranks", "", *(f"{part}, ms (of FSDP2's)" for part in PARTS))


class _Stream:
    """One that has done its work when a call returns; its own event."""

    def wait_stream(self, other: _Stream) -> None: ...

    def wait_event(self, event: _Stream) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def query(self) -> bool:
        return True


class _Device(CudaDevice):
    """Does everything at once, so what is left of `DeviceStreams` is the host's part."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._current = _Stream()

    def current(self) -> _Stream:
        return self._current

    def stream(self) -> _Stream:
        return _Stream()

    pull_stream = stream

    def enqueue(self, stream: _Stream, work: Callable[..., None], memory: Any = None) -> None:
        work(memory) if isinstance(memory, torch.Tensor) else work()


class AtOnceBackend(CpuBackend):
    """Gathers and frees whole tensors as on a GPU, copy by copy."""

    name, apart, heap = GATHERED, True, ApartHeap

    def streams(self) -> Streams:
        return DeviceStreams(_Device())


BACKENDS[GATHERED] = AtOnceBackend


class TinyUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.scale


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TinyUnit() for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_fsdp2(model: TinyModel) -> nn.Module:
    for part in (*model.layers, model):
        fsdp2_fully_shard(part)
    return model


def by_odc(model: TinyModel, *, backend: str = "cpu", replaced: bool = False) -> nn.Module:
    if replaced:
        replace_layers(model, roles=("linear",), verbose=False)
    return fully_shard(model, backend=backend)


ARMS: dict[str, Callable[[TinyModel], nn.Module]] = {
    PLAIN: lambda model: model,
    FSDP2: by_fsdp2,
    "views": by_odc,
    "gathered": partial(by_odc, backend=GATHERED),
    "replaced layers": partial(by_odc, replaced=True),
}


def cpu_s() -> float:
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


class Arm:
    def __init__(self, shard: Callable[[TinyModel], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = shard(TinyModel())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)  # a GPU's default

    def minibatch(self) -> AbstractContextManager[Any]:
        return minibatch(self.model) if hasattr(self.model, "_odc_engine") else nullcontext()

    def round(self, x: torch.Tensor) -> dict[str, float]:
        """One minibatch; CPU seconds of its parts."""
        times, at_s = [], cpu_s()

        def lap() -> float:
            nonlocal at_s
            before_s, at_s = at_s, cpu_s()
            return at_s - before_s

        with self.minibatch():
            entry_s = lap()
            for _ in range(MICROBATCHES):
                self.model(x).sum().backward()
                times.append(lap())
        around_s = entry_s + lap()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        clip_s = lap()
        self.optimizer.step()
        step_s = lap()
        self.optimizer.zero_grad()
        return dict(zip(PARTS, (statistics.median(times), clip_s, step_s, clip_s + step_s, around_s), strict=True))


def measure(rounds: int, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """By arm and part, each round's seconds on rank 0. Collective."""
    open_job()
    arms = {name: Arm(ARMS[name]) for name in names}
    x, found = torch.randn(ROWS, WIDTH), {name: {part: [] for part in PARTS} for name in names}
    for number in range(WARM_UP + rounds):
        for name in in_turn(names, number):
            dist.barrier()
            for part, seconds in arms[name].round(x).items():
                found[name][part] += [seconds] if number >= WARM_UP else []
    gather(None)
    dist.destroy_process_group()
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """By arm and part: the median time, and its ratio to FSDP2's with an interval."""

    def of_part(part: str, seconds: list[float]) -> dict[str, float]:
        ratio = median_ratio(seconds, found[FSDP2][part], draws=2000) if part != "entry and exit" else {}
        return {"seconds": statistics.median(seconds), **ratio}

    return {name: {part: of_part(part, of) for part, of in parts.items()} for name, parts in found.items()}


def cell(of: dict[str, float]) -> str:
    milliseconds = f"{of['seconds'] * 1e3:.2f}"
    return f"{milliseconds} ({of['ratio']:.2f}, {of['low']:.2f} to {of['high']:.2f})" if "ratio" in of else milliseconds


def main() -> None:
    given = options_of(__doc__, rounds=60)
    single_thread_environment()
    results = {ranks: summary(launch(measure, given.rounds, [*ARMS], ranks=ranks)[0]) for ranks in (1, 2)}
    rows = [
        [ranks, name, *map(cell, parts.values())] for ranks, arms in results.items() for name, parts in arms.items()
    ]
    print(table(rows, COLUMNS))
    if given.out is not None:
        save_parts(given.out, about=about(), rounds=given.rounds, units=UNITS, ranks=results)


if __name__ == "__main__":
    main()
