"""Split sequences on several hosts while ranks are killed or stopped, and cables are cut.

    python -m bench.suites.host_faults [--faults 40] [--seed 0] [--kinds kill stop cut] [--places …] [--out FILE]

Two or three network namespaces with TCP between them, a replica in each. A random rank meets its fault in a wave's
forward or backward, at the exit, in the sum of gradients over the replicas or in the exchange after a step. All others
must name it, or a rank of the host that was cut off, and on that host a rank of the others: within 10 s, or two
deadlines of 4 s if it was stopped. Gradients must be those of one process until then, all must end, nothing may stay.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc_triton.base.errors import OfRanks
from odc_triton.engine.api import engine_of
from odc_triton.jobs.reports.report import table
from odc_triton.sequence.buffers import Flag
from odc_triton.sequence.exchange import SequenceExchange

from ..provenance import about, options_of, save_parts
from .hosts_net import Hosts, inside, why_not
from .split_jobs import LAYERS, Job, build, compute, compute_whole, deal_evenly, sharded

KINDS = ("kill", "stop", "cut")
PLACES = ("forward", "backward", "exit", "sum", "exchange")
SHAPES = ((2, 2), (3, 2), (2, 3))  # hosts, ranks of each
WITHIN_S, DEADLINE_S = 10.0, 4.0  # the deadline: of those that wait for a stopped rank
LONG_S = 120.0
RELATIVE, ABSOLUTE = 1e-4, 1e-6  # gradients are added in the order of their arrival
LEARNING_RATE = 1e-2
COLUMNS = ("kind", "place", "tried", "named in time", "largest s", "wrong")
_INSIDE = "ODC_BENCH_INSIDE"

Say = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Of rank `victim`, or its host's cable. `late`: as late as possible at this place. `in_rank_0`: the store is in
    rank 0's process, not in one of its own.
    """

    kind: str
    place: str
    hosts: int
    ranks: int
    victim: int
    minibatch: int
    wave: int
    layer: int
    late: bool
    in_rank_0: bool
    seed: int

    @classmethod
    def at_random(cls, numbers: random.Random, kind: str, place: str) -> Fault:
        hosts, of_each = numbers.choice(SHAPES)
        return cls(
            kind=kind,
            place=place,
            hosts=hosts,
            ranks=hosts * of_each,
            victim=numbers.randrange(hosts * of_each),
            minibatch=numbers.randrange(2),
            wave=numbers.randrange(2),
            layer=numbers.randrange(LAYERS),
            late=numbers.random() < 0.5,
            in_rank_0=numbers.random() < 0.5,
            seed=numbers.randrange(2**31),
        )

    @property
    def host(self) -> int:
        return self.victim * self.hosts // self.ranks

    @property
    def limit_s(self) -> float:
        return 2 * DEADLINE_S if self.kind == "stop" else WITHIN_S

    @property
    def witnesses(self) -> list[int]:
        """The ranks that must name it."""
        return [rank for rank in range(self.ranks) if rank != self.victim or self.kind == "cut"]

    def is_named(self, rank: int, named: Sequence[int]) -> bool:
        """`named`: by `rank`."""
        if self.kind != "cut":
            return list(named) == [self.victim]
        hosts = {each * self.hosts // self.ranks for each in named}
        here = rank * self.hosts // self.ranks == self.host
        return bool(hosts) and (self.host not in hosts if here else hosts == {self.host})


class _Trap:
    """Around what the victim does: strikes once at the fault's place."""

    def __init__(self, model: nn.Module, fault: Fault, strike: Callable[[], None]) -> None:
        self.fault, self.is_set, self.minibatch, self.wave = fault, True, 0, -1
        self._strike = strike
        engine = engine_of(model)
        exchange = engine.participant(SequenceExchange)
        self.signal, exchange.sync.signal = exchange.sync.signal, self.on_signal
        self.post, engine.barrier.post = engine.barrier.post, self.on_post
        self.ask, engine.barrier._ask = engine.barrier._ask, self.on_ask
        self.run, engine.replicas._run = engine.replicas._run, self.on_run

    def strike(self, place: str, *, late: bool) -> None:
        if self.is_set and (place, late, self.minibatch) == (self.fault.place, self.fault.late, self.fault.minibatch):
            self.is_set = False
            self._strike()

    def on_signal(self, flag: Flag, ranks: Any, layer: int, epoch: int) -> None:
        place = "forward" if epoch % 2 else "backward"
        self.wave += place == "forward" and layer == 0
        here = self.wave >= self.fault.wave and layer == self.fault.layer
        for late in (False, True):
            if here:
                self.strike(place, late=late)
            if not late:
                self.signal(flag, ranks, layer, epoch)

    def on_post(self, purpose: str, message: dict) -> None:
        self.leaves = purpose.startswith("leave minibatch")
        if self.leaves:
            self.strike("exit", late=False)
        self.post(purpose, message)

    def on_ask(self, question: Callable[[], Any]) -> Future:
        if self.leaves:  # all ranks have reached the barrier
            self.strike("exit", late=True)
        return self.ask(question)

    def on_run(self, purpose: str, collective: Callable, *given: Any, **named: Any) -> None:
        place = "sum" if "sum" in purpose else "exchange"

        def started(*given: Any, **named: Any) -> Any:
            work = collective(*given, **named)
            self.strike(place, late=True)
            return work

        self.strike(place, late=False)
        self.run(purpose, started, *given, **named)


def _rows(whole: torch.Tensor, rank: int, fault: Fault) -> torch.Tensor:
    """What that rank owns of a parameter."""
    shards = fault.ranks // fault.hosts
    for number, count in ((rank % shards, shards), (rank // shards, fault.hosts)):
        parts = whole.chunk(count)
        whole = parts[number] if number < len(parts) else whole[:0]
    return whole


def _is_right(model: nn.Module, plain: nn.Module, rank: int, fault: Fault) -> bool:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        want = _rows(theirs.grad, rank, fault)
        if not torch.allclose(ours.grad.to_local(), want, rtol=RELATIVE, atol=ABSOLUTE + RELATIVE * theirs.grad.norm()):
            print(f"rank {rank}: the gradient of {name} is wrong", flush=True)
            return False
    return True


def trains_until_struck(rank: int, ranks: int, say: Say, fault: Fault, hosts: Hosts) -> None:
    """A rank of the job: says whom it names and when, and when it has ended its process group."""
    model, plain, numbers = sharded(LONG_S, fault.hosts), build(), random.Random(fault.seed)
    optimizers = [torch.optim.SGD(each.parameters(), lr=LEARNING_RATE) for each in (model, plain)]

    def strike() -> None:
        say("struck", time.monotonic())
        if fault.kind == "cut":
            hosts.cut(fault.host)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    trap = _Trap(model, fault, strike if rank == fault.victim else lambda: None)
    try:
        for number in range(fault.minibatch + 2):
            if number == fault.minibatch and fault.kind == "stop":
                engine_of(model).barrier.timeout_s = DEADLINE_S
            trap.minibatch, trap.wave = number, -1
            deal = deal_evenly(numbers, ranks, fault.hosts)
            compute(model, deal, rank, number)
            compute_whole(plain, deal, number)
            if not _is_right(model, plain, rank, fault):
                say("wrong", "its gradients are wrong")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    except OfRanks as error:
        say("named", time.monotonic(), error.ranks, f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    say("ended", time.monotonic())


def run_fault(fault: Fault) -> tuple[float, list[str], list[str]]:
    """(seconds until the last rank named it, what was not named in time, what else went wrong)."""
    hosts = Hosts(fault.hosts)
    struck_s, named, ended, wrong = None, {}, {}, []
    late = []
    try:
        with Job(trains_until_struck, fault.ranks, fault, hosts, hosts=hosts, in_rank_0=fault.in_rank_0) as job:
            for rank, (kind, *said) in job.messages(2 * LONG_S):
                if kind == "struck":
                    struck_s = said[0]
                elif kind == "named" and fault.is_named(rank, said[1]):
                    named[rank] = said[0]
                elif kind == "ended":
                    ended[rank] = said[0]
                else:
                    wrong.append(f"rank {rank} said {said}")
                if len(ended) == len(fault.witnesses):
                    break
    finally:
        hosts.close()
    wrong += [f"{each} stayed" for each in job.leftovers()]
    if struck_s is None:
        return 0.0, [], [*wrong, "the place was never reached"]
    for rank in fault.witnesses:
        if rank not in named:
            late.append(f"rank {rank} did not name it")
        elif named[rank] - struck_s > fault.limit_s:
            late.append(f"rank {rank} named it after {named[rank] - struck_s:.1f} s")
        if rank not in ended:
            wrong.append(f"rank {rank} did not end")
        elif ended[rank] - named.get(rank, struck_s) > fault.limit_s:
            wrong.append(f"rank {rank} ended {ended[rank] - struck_s:.1f} s after the fault")
    return max(named.values(), default=struck_s) - struck_s, late, wrong


def run(faults: Sequence[Fault]) -> dict[str, Any]:
    """`faults` of the result; prints what goes wrong."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number, fault in enumerate(faults):
        row = rows.setdefault(
            (fault.kind, fault.place),
            {"kind": fault.kind, "place": fault.place, "tried": 0, "named_in_time": 0, "largest_s": 0.0, "wrong": 0},
        )
        took_s, late, wrong = run_fault(fault)
        row["tried"] += 1
        row["named_in_time"] += not late
        row["wrong"] += bool(wrong)
        row["largest_s"] = max(row["largest_s"], took_s)
        print(f"{number}: {fault.kind} {fault.place}: {took_s:.1f} s", flush=True)
        if late or wrong:
            print(f"{fault}: {'; '.join(late + wrong)}", flush=True)
    found = sorted(rows.values(), key=lambda row: (KINDS.index(row["kind"]), PLACES.index(row["place"])))
    sums = {key: sum(row[key] for row in found) for key in ("tried", "named_in_time", "wrong")}
    return {**sums, "deadline_s": DEADLINE_S, "rows": found}


def main() -> int:
    options = options_of(__doc__, faults=40, kinds=KINDS, places=PLACES, seed=0)
    numbers, cells = random.Random(options.seed), [(kind, place) for place in options.places for kind in options.kinds]
    faults = [Fault.at_random(numbers, *cells[number % len(cells)]) for number in range(options.faults)]
    found = run(faults)
    print(table([[*row.values()] for row in found["rows"]], COLUMNS))
    if options.out:
        save_parts(options.out, faults=found | {"seed": options.seed, **about()})
    return int(found["named_in_time"] < found["tried"] or found["wrong"] > 0)


if __name__ == "__main__":
    if _INSIDE in os.environ:
        sys.exit(main())
    if (reason := why_not()) is not None:
        sys.exit(reason)
    os.environ |= {_INSIDE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = inside(sys.executable, "-m", "bench.suites.host_faults", *sys.argv[1:])
    os.execvp(command[0], command)
