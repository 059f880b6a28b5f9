"""A rank is killed or stands still while others compute segments with it: all others name it and no other, on all
replicas.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import pytest
import torch

from odc_triton import enable_split, fully_shard, repeating
from odc_triton.base.errors import OfRanks
from odc_triton.comm.memory.heap import SharedMemoryHeap
from odc_triton.sequence.buffers import Flag
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.sequence.sync import ShownWaits, Wait
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S
from tests.support.leftovers import is_stopped
from tests.support.replicas import mesh_of
from tests.support.splitting import DEALS, Dealt, P, Setup, build, step_on


def _ends_in(where: str, number: int, at_layer: int = 1, *, in_recomputation: bool = False) -> None:
    """This rank's process gets that signal when it publishes (in its forward), adds (in its backward) or has read."""
    own = getattr(SequenceExchange, where)

    def dies(self: SequenceExchange, layer: int, *rest: Any, again: bool = False, **named: Any) -> Any:
        if layer == at_layer and again == in_recomputation:
            os.kill(os.getpid(), number)
        return own(self, layer, *rest, **named, **({"again": True} if again else {}))

    setattr(SequenceExchange, where, dies)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """`victim` stops in layer `layer` when it is about to `where`: "wait" is when it shows that it waits for a flag
    of kind `flag`, which comes afterwards. `in_flight`: layers with buffers, with checkpointing; `again`: it publishes
    in its recomputation.
    """

    deal: Dealt
    where: str
    victim: int
    layer: int = 1
    flag: Flag = Flag.PUBLISHED
    signal: int = signal.SIGSTOP
    replicas: int = 1
    exact: bool = False
    in_flight: int | None = None
    again: bool = False
    family: str = "Qwen2"


_BESIDE: Dealt = [[[P(0, 0, 24), 3]], [[P(0, 24, 41)]], [[1]]]  # rank 2 is at the exit soon
_BEHIND: Dealt = [[[P(2, 0, 10)]], [[P(2, 10, 30), P(0, 0, 13)]], [[P(0, 13, 41)]]]  # rank 2 needs rank 1's alone
_AWAY: Dealt = [[[0]], [], [[P(2, 0, 10)]], [[P(2, 10, 30)]]]  # replica 0 is at the exit soon
# Ranks 3, 4, 5 read and add to what rank 3 has; replica 0 is at the exit soon.
_THREE: Dealt = [[[0]], [], [], [[P(2, 0, 10), 1]], [[P(2, 10, 20)]], [[P(2, 20, 30)]]]
STOPS = {
    "publishing, one at the exit": Stop(deal=_BESIDE, where="publish", victim=0),
    "adding, one behind another": Stop(deal=_BEHIND, where="begin_adding", victim=2),
    "waiting": Stop(deal=_BESIDE, where="wait", victim=1),
    "waiting, a replica at the exit": Stop(deal=_AWAY, where="wait", victim=3, replicas=2),
    # Rank 5 waits for the lock that rank 4 holds, and rank 3 for rank 5.
    "adding under the lock": Stop(deal=_THREE, where="lock", victim=4, replicas=2),
    # Rank 5 waits for rank 4 before it adds, and rank 3 for both: all for a flag of the same layer.
    "adding in order": Stop(deal=_THREE, where="begin_adding", victim=4, replicas=2, exact=True),
    # Rank 0 waits until rank 1 has read layer 0, as layer 1 has the same buffer.
    "reading": Stop(deal=_BESIDE, where="have_read", victim=1, layer=0, in_flight=1),
    "waiting for readers": Stop(deal=_BESIDE, where="wait", victim=0, flag=Flag.READ, in_flight=1),
    "publishing again": Stop(deal=_BESIDE, where="publish", victim=0, layer=0, in_flight=1, again=True),
    "waiting to add in order": Stop(deal=_THREE, where="wait", victim=5, flag=Flag.ADDED, replicas=2, exact=True),
}


def _stops(stop: Stop, rank: int, victim: int, heap: SharedMemoryHeap) -> None:
    if stop.where == "lock":
        try_lock = heap.try_lock

        def stops_with_it(*given: Any) -> bool:
            while rank != stop.victim and not is_stopped(victim):
                time.sleep(0.01)
            took = try_lock(*given)
            if rank == stop.victim:
                os.kill(os.getpid(), signal.SIGSTOP)
            return took

        heap.try_lock = stops_with_it
        return
    if stop.where != "wait":
        if rank == stop.victim:
            _ends_in(stop.where, stop.signal, stop.layer, in_recomputation=stop.again)
        return
    late = {Flag.PUBLISHED: "publish", Flag.READ: "have_read", Flag.ADDED: "begin_adding"}[stop.flag]
    comes, show = getattr(SequenceExchange, late), ShownWaits.show

    def comes_late(self: SequenceExchange, *given: Any, **named: Any) -> Any:
        while rank != stop.victim and not is_stopped(victim):
            time.sleep(0.01)
        return comes(self, *given, **named)

    def show_and_stop(self: ShownWaits, wait: Wait, **named: Any) -> None:
        show(self, wait, **named)
        if rank == stop.victim and wait.flag is stop.flag:
            os.kill(os.getpid(), signal.SIGSTOP)

    setattr(SequenceExchange, late, comes_late)
    ShownWaits.show = show_and_stop


def _end_the_deadline(model: torch.nn.Module, stop: Stop, rank: int, victim: int) -> None:
    """Once the victim stands still and all others wait, whatever the machine's speed; first on other replicas."""
    engine, waits = model._odc_engine, model._odc_engine.participant(SequenceExchange).sync.waits._waits

    def all_wait() -> bool:
        at_exit = [reached > engine.barrier.passed for reached in engine.barrier._reached.seen()]
        return all(
            shown or arrived or rank == stop.victim
            for rank, (shown, arrived) in enumerate(zip(waits.seen(), at_exit, strict=True))
        )

    while not is_stopped(victim) or not all_wait():
        time.sleep(0.01)
    shards = len(stop.deal) // stop.replicas
    time.sleep(0.2 if rank // shards != stop.victim // shards else 0.4)  # waits that are over are no longer shown
    engine.barrier.timeout_s = 0.0


def _beside_one_that_stops(rank: int, world: int, stop: Stop, backend: str) -> tuple[str, list[int]]:
    change = "none" if stop.in_flight is None else "checkpointing"
    setup = Setup(replicas=stop.replicas, change=change, family=stop.family)
    mesh = mesh_of((stop.replicas, world // stop.replicas)) if stop.replicas > 1 else None
    model = fully_shard(build(setup, replaced=True), mesh=mesh, backend=backend, exact=stop.exact, timeout=LONG_S)
    enable_split(model, tokens=48, layers_in_flight=stop.in_flight)
    pids = model._odc_engine.exchange("processes", {"pid": os.getpid()})
    victim = pids[stop.victim]["pid"]
    if stop.signal == signal.SIGSTOP:
        Thread(target=_end_the_deadline, args=(model, stop, rank, victim), daemon=True).start()
    _stops(stop, rank, victim, model._odc_engine.participant(SequenceExchange).buffers.heap)
    with pytest.raises(OfRanks) as caught:
        repeating(lambda: step_on(model, setup, rank, deal=stop.deal))
    return f"{type(caught.value).__name__}: {caught.value}", caught.value.ranks


def _said_by_others(stop: Stop, backend: str) -> list[tuple[str, list[int]]]:
    """What the others than the victim said, and which ranks they blamed."""
    world = len(stop.deal)
    with ranks.start(_beside_one_that_stops, world, stop, backend) as job:
        outcomes = job.wait_for([rank for rank in range(world) if rank != stop.victim])
    assert [outcome.error for outcome in outcomes] == [None] * (world - 1)
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("publishing, one at the exit", "cpu"),
        ("adding, one behind another", "cpu"),
        ("waiting", "cpu-interpreter"),
        ("waiting, a replica at the exit", "cpu"),
        ("reading", "cpu"),
        ("waiting for readers", "cpu"),
        slow("adding under the lock", "cpu"),
        slow("adding in order", "cpu-interpreter"),
        slow("waiting to add in order", "cpu"),
    ],
)
def test_all_others_name_the_rank_that_stands_still_alone(name: str, backend: str) -> None:
    stop = STOPS[name]
    for said, blamed in _said_by_others(stop, backend):
        assert said.startswith("DeadlineExceeded: "), said
        assert blamed == [stop.victim], said
        assert re.search(rf"(for|of|by) rank {stop.victim}( at|$)", said), said


KILLS = {
    # One of the others waits for a rank that only waits for the killed one: on kernels its wait goes on until then.
    "adding, one behind another": (STOPS["adding, one behind another"], "cpu-interpreter", ""),
    "publishing": (
        Stop(deal=DEALS["zigzag"], where="publish", victim=1),
        "cpu",
        r"keys and values of tokens 8\.\.19 of sample 0 in layer 1",
    ),
    "adding": (
        Stop(deal=DEALS["zigzag"], where="begin_adding", victim=1),
        "cpu-sharded",
        r"gradients of tokens \d+\.\.\d+ of sample 0 from tokens 8\.\.19 of sample 0 in layer 1",
    ),
    "reading": (STOPS["reading"], "cpu", r"tokens 24\.\.40 of sample 0 to read keys and values of layer 0"),
    "publishing again": (STOPS["publishing again"], "cpu", r"keys and values of tokens 0\.\.23 of sample 0 in layer 0"),
    "adding in order": (STOPS["adding in order"], "cpu-interpreter", ""),
}


@pytest.mark.parametrize("name", [slow(name) if STOPS.get(name, Stop).replicas > 1 else name for name in KILLS])
def test_a_killed_rank_is_named(name: str) -> None:
    stop, backend, awaited = KILLS[name]
    start_s = time.monotonic()
    found = _said_by_others(replace(stop, signal=signal.SIGKILL), backend)
    assert time.monotonic() - start_s < LONG_S / 2
    for said, blamed in found:
        assert said.startswith("RankLost: "), said
        assert f"rank {stop.victim} died" in said, said
        assert blamed == [stop.victim], said
    assert any(re.search(awaited, said) for said, _ in found), found
