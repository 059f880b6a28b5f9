"""Split sequences while ranks are killed, and for a long time at random speeds.

    python -m bench.suites.split_faults [--kills 20] [--soak-minutes 30] [--seed 0] [--trees] [--backend cpu] [--out F]

kills   a rank is killed at each of eight places, at random ranks, layers and minibatches. All others must name it
        within 10 s, and nothing may stay.
soak    random plans, with random sleeps before ranks publish, read, add and collect. No wait may reach the deadline,
        and gradients must be those of the model on whole samples.

With --trees other samples branch off those in pieces; some of the soak's plans are the planner's own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from odc_triton import full_parameters
from odc_triton.base.errors import OfRanks
from odc_triton.base.report import table
from odc_triton.engine.api import engine_of
from odc_triton.hf import attention
from odc_triton.sequence.buffers import Flag
from odc_triton.sequence.sync import Wait

from ..provenance import about, save_json
from .split_jobs import (
    BACKENDS,
    LAYERS,
    Job,
    build,
    checkpoint_layers,
    compute,
    compute_whole,
    deal_as_planned,
    deal_at_random,
    deal_evenly,
    die,
    sharded,
)

PLACES = ("waiting in a forward", "waiting in a backward", "publishing", "adding", "attending")
REUSED = ("waiting for readers", "publishing again", "waiting in a recomputation")  # where layers share one buffer
WITHIN_S = 10.0
RANKS, SOAK_RANKS = 3, (3, 4)
DEADLINE_S = 60.0
CHECK_EVERY = 5
RELATIVE, ABSOLUTE = 1e-5, 1e-7  # gradients are added in the order of their arrival
COLUMNS = ("place", "kills", "named within s: median", "largest", "wrong")

Say = Callable[..., None]


# ------------------------------------------------------------------ kills


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Of rank `victim` in `layer` of a wave of a minibatch; `moment`, from 0 to 1: when there. `trees`: in its plan."""

    place: str
    victim: int
    minibatch: int
    wave: int
    layer: int
    moment: float
    seed: int
    trees: bool

    @classmethod
    def at_random(cls, numbers: random.Random, place: str, *, trees: bool) -> Kill:
        return cls(
            place=place,
            victim=numbers.randrange(RANKS),
            minibatch=numbers.randrange(3),
            wave=numbers.randrange(2),
            layer=numbers.randrange(LAYERS - (place in REUSED)),
            moment=numbers.random(),
            seed=numbers.randrange(2**31),
            trees=trees,
        )


def _waits(flag: Flag, epoch: int) -> str:
    """The place at which a rank waits for it."""
    if flag is Flag.PUBLISHED:
        return "waiting in a forward" if epoch % 2 else "waiting in a recomputation"
    return "waiting for readers" if flag is Flag.READ else "waiting in a backward"


class _Trap:
    """Around what a rank does on pieces: kills the victim at its place, and there makes the others late."""

    def __init__(self, model: nn.Module, rank: int, kill: Kill, say: Say) -> None:
        self.exchange = engine_of(model).participant("split")
        self.sync = self.exchange.sync
        self.kill, self.is_victim = kill, rank == kill.victim
        self.strike = lambda *_: die(say)
        self.minibatch, self.wave, self.layer = 0, -1, 0
        self.third = int(kill.moment * 3)
        self.publish, self.signal = self.exchange.publish, self.sync.signal
        self.add, self.wait, self.attend = self.sync.add, self.sync.wait, attention.AttentionOfTree.apply
        self.exchange.publish = self.on_publish
        if self.is_victim:
            self.sync.signal, self.sync.add, self.sync.wait = self.on_signal, self.on_add, self.on_wait
            attention.AttentionOfTree = SimpleNamespace(apply=self.on_attention)
        else:
            self.sync.signal = self.late_signal

    def is_at(self, place: str, layer: int) -> bool:
        kill = self.kill
        return (place, self.minibatch, layer) == (kill.place, kill.minibatch, kill.layer) and self.wave >= kill.wave

    def on_publish(self, layer: int, *rest: Any, again: bool) -> None:
        self.wave, self.layer = self.wave + (layer == 0 and not again), layer
        if self.is_victim and self.third == 0 and self.is_at("publishing again" if again else "publishing", layer):
            self.strike()
        self.publish(layer, *rest, again=again)

    def late_signal(self, flag: Flag, ranks: Any, layer: int, epoch: int) -> None:
        if self.is_at(_waits(flag, epoch), layer):
            time.sleep(0.05)
        self.signal(flag, ranks, layer, epoch)

    def on_signal(self, flag: Flag, ranks: Any, layer: int, epoch: int) -> None:
        publishing = "publishing" if epoch % 2 else "publishing again"
        here = flag is not Flag.READ and self.is_at(publishing if flag is Flag.PUBLISHED else "adding", layer)
        if here and self.third == 1:  # rows are there, flags are not
            self.strike()
        self.signal(flag, ranks, layer, epoch)
        if here:
            self.strike()

    def on_add(self, shown: Wait, owner: int, *rest: Any) -> None:
        if self.third == 0 and self.is_at("adding", shown.layer):
            heap = self.exchange.buffers.heap
            while not self.exchange.is_apart and not heap.try_lock(shown.layer, owner):
                time.sleep(1e-5)
            self.strike()
        self.add(shown, owner, *rest)

    def on_wait(self, wait: Any) -> None:
        if self.is_at(_waits(wait.flag, wait.epoch), wait.layer):
            threading.Timer(0.04 * self.kill.moment, self.strike).start()
        self.wait(wait)

    def on_attention(self, *given: Any) -> torch.Tensor:
        out = self.attend(*given)
        if self.is_at("attending", self.layer):
            if self.kill.moment < 0.5:
                self.strike()
            out.register_hook(self.strike)
        return out


def computes_until_killed(rank: int, ranks: int, say: Say, kill: Kill, backend: str) -> None:
    """A rank of a job with a fault: says whom it names, and when."""
    model, numbers = sharded(backend, DEADLINE_S, reused=kill.place in REUSED), random.Random(kill.seed)
    trap = _Trap(model, rank, kill, say)
    for number in range(kill.minibatch + 2):
        trap.minibatch, trap.wave = number, -1
        try:
            compute(model, deal_evenly(numbers, ranks, trees=kill.trees), rank, number)
        except OfRanks as error:
            say("named", time.monotonic(), error.ranks, f"{type(error).__name__}: {error}")
            return
        model.zero_grad()


def run_kill(kill: Kill, backend: str) -> tuple[float, list[str]]:
    """(seconds until the last rank named the killed one, what went wrong)."""
    struck_s, last_s, named, wrong = None, 0.0, set(), []
    with Job(computes_until_killed, RANKS, kill, backend) as job:
        for rank, (kind, *said) in job.messages(DEADLINE_S):
            if kind == "struck":
                struck_s = said[0]
            elif kind == "named" and said[1] == [kill.victim] and said[2].startswith("RankLost"):
                last_s = max(last_s, said[0])
                named.add(rank)
            else:
                wrong.append(f"rank {rank} said {said}")
    wrong += [f"rank {rank} did not end" for rank in job.running]
    wrong += [f"{each} stayed" for each in job.leftovers()]
    if struck_s is None:
        return 0.0, [*wrong, "the place was never reached"]
    wrong += [f"rank {rank} named nobody" for rank in sorted(set(range(RANKS)) - named - {kill.victim})]
    if last_s - struck_s > WITHIN_S:
        wrong.append(f"it was named after {last_s - struck_s:.1f} s")
    return last_s - struck_s, wrong


def run_kills(
    places: Sequence[str], kills: int, numbers: random.Random, backend: str, *, trees: bool = False
) -> list[dict]:
    """A row for each place; prints what goes wrong."""
    rows = []
    for place in places:
        times_s, bad = [], 0
        for _ in range(kills):
            kill = Kill.at_random(numbers, place, trees=trees)
            took_s, wrong = run_kill(kill, backend)
            times_s.append(took_s)
            if wrong:
                bad += 1
                print(f"{kill}: {'; '.join(wrong)}", flush=True)
        within = {"median": statistics.median(times_s), "largest": max(times_s)}
        rows.append({"place": place, "kills": kills, "named_within_s": within, "wrong": bad})
        print(f"{place}: {kills} kills, {bad} wrong", flush=True)
    return rows


def cells_of(row: dict) -> list[object]:
    within = row["named_within_s"]
    return [row["place"], row["kills"], f"{within['median']:.2f}", f"{within['largest']:.2f}", row["wrong"]]


# ------------------------------------------------------------------ soak


def _at_random_speed(exchange: Any, numbers: random.Random) -> None:
    def late(function: Callable) -> Callable:
        def called(*given: Any, **named: Any) -> Any:
            if numbers.random() < 0.2:
                time.sleep(min(numbers.expovariate(200), 0.2))
            return function(*given, **named)

        return called

    for name in ("publish", "read", "begin_adding", "collect"):
        setattr(exchange, name, late(getattr(exchange, name)))


class _Waits:
    """The longest wait for another rank's flags."""

    def __init__(self, sync: Any) -> None:
        self.longest_s, self._wait = 0.0, sync.wait
        sync.wait = self

    def __call__(self, wait: Any) -> None:
        start_s = time.monotonic()
        self._wait(wait)
        self.longest_s = max(self.longest_s, time.monotonic() - start_s)


def _difference(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest of all parameters, relative to what is allowed: at most 1."""
    if found.keys() != want.keys():
        return float("inf")
    differences = ((found[name] - each).norm() / (RELATIVE * each.norm() + ABSOLUTE) for name, each in want.items())
    return max(each.item() for each in differences)


def soaks(rank: int, ranks: int, say: Say, seed: int, seconds: float, backend: str, trees: bool) -> None:
    """A rank of the soak. Rank 0 says how far it is every 30 s, and at the end."""
    model, plain = sharded(backend, DEADLINE_S), build()
    engine, end_s, next_s, number = engine_of(model), time.monotonic() + seconds, 30.0, 0
    _at_random_speed(engine.participant("split"), random.Random(f"{seed} {rank}"))
    waits, largest = _Waits(engine.participant("split").sync), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    is_last = False
    while not is_last:
        numbers = random.Random(f"{seed} {ranks} {number}")
        is_planned = trees and numbers.random() < 0.3
        deal = deal_as_planned(numbers, ranks) if is_planned else deal_at_random(numbers, ranks, trees=trees)
        checkpoint_layers(model, numbers.random() < 0.5)
        if is_checked := number % CHECK_EVERY == 0:
            plain.load_state_dict(dict(full_parameters(model)), strict=False)
        compute(model, deal, rank, number)
        if is_checked:
            found = {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None}
            if rank == 0:
                largest = max(largest, _difference(found, compute_whole(plain, deal, number)))
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        left_s = end_s - time.monotonic()
        told = engine.exchange("the next minibatch", {"is_last": left_s < 0, "wait_s": waits.longest_s})
        is_last = told[0]["is_last"]
        if rank == 0 and (is_last or seconds - left_s > next_s):
            next_s += 30
            longest_s = max(theirs["wait_s"] for theirs in told)
            counts = {"ranks": ranks, "minibatches": number, "checked": -(-number // CHECK_EVERY)}
            say("soak", counts | {"longest_wait_s": longest_s, "largest_difference": largest * RELATIVE})


def run_soak(seconds: float, seed: int, backend: str, *, trees: bool = False) -> list[dict]:
    """For equal times on each number of ranks: what each job did, and its `errors`."""
    results = []
    for ranks in SOAK_RANKS:
        result, errors = {"ranks": ranks, "minibatches": 0}, []
        with Job(soaks, ranks, seed, seconds / len(SOAK_RANKS), backend, trees) as job:
            for rank, (kind, *said) in job.messages(2 * DEADLINE_S):
                if kind == "soak":
                    result = said[0]
                    print(f"soak: {result}", flush=True)
                else:
                    errors.append(f"rank {rank}: {said[0]}")
                    print(errors[-1], flush=True)
        errors += [f"rank {rank} did not end" for rank in job.running] + [f"{each} stayed" for each in job.leftovers()]
        if not result["minibatches"]:
            errors.append("nothing was computed")
        elif result["largest_difference"] > RELATIVE:
            errors.append("gradients differ")
        results.append(result | {"errors": errors})
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.suites.split_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="at each place")
    parser.add_argument("--places", nargs="+", choices=PLACES + REUSED, default=[*PLACES, *REUSED])
    parser.add_argument("--soak-minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--trees", action="store_true", help="samples that branch off others")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args(arguments)
    rows, soak, trees = [], [], {"trees": options.trees}
    if options.kills:
        rows = run_kills(options.places, options.kills, random.Random(options.seed), options.backend, **trees)
        print(table([cells_of(row) for row in rows], COLUMNS))
    if options.soak_minutes:
        soak = run_soak(60 * options.soak_minutes, options.seed, options.backend, **trees)
    if options.out:
        given = {"backend": options.backend, "seed": options.seed, "soak_minutes": options.soak_minutes}
        save_json(options.out, {"kills": rows, "soak": soak, **given, **trees, **about()})
    return int(any(row["wrong"] for row in rows) or any(result["errors"] for result in soak))


if __name__ == "__main__":
    sys.exit(main())
