"""Ranks on several hosts: one that stands still with the store in it, a host that is cut off."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from odc_triton import OdcError, fully_shard
from tests.support import namespaces, ranks
from tests.support.deadlines import LONG_S, SHORT_S, until
from tests.support.leftovers import environment, is_stopped
from tests.support.models import build
from tests.support.replicas import mesh_of

ROOT = Path(__file__).parents[2]


def _beside_a_stopped_store(rank: int, world: int) -> tuple[str, list[int]]:
    """Rank 0 arrives and stops before the other one has read what it left in its store."""
    barrier = fully_shard(build("conv"), mesh=mesh_of((2, 1)), timeout=LONG_S)._odc_engine.barrier
    pid = barrier.exchange("pids", {"pid": os.getpid()})[0]["pid"]
    barrier.timeout_s, ask = SHORT_S, barrier._ask

    def late(question: Callable[[], object]) -> object:
        if rank == 0:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: is_stopped(pid))
        return question()

    barrier._ask = lambda question: ask(partial(late, question))
    with pytest.raises(OdcError) as caught:
        barrier.exchange("leave", {})
    barrier.abort("the store must not be asked again")
    return f"{type(caught.value).__name__}: {caught.value}", caught.value.ranks


def test_a_store_that_is_stopped_is_not_waited_for_without_a_deadline() -> None:
    with ranks.start(_beside_a_stopped_store, 2, store_in_rank_0=True) as job:
        (outcome,) = job.wait_for([1])
    said, blamed = outcome.value
    assert blamed == [0]
    assert said.startswith("DeadlineExceeded: rank 1 has waited ")
    assert "for rank 0 at 'leave: the store on its host'" in said


_SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch
from odc_triton import fully_shard, minibatch

model = fully_shard(torch.nn.Linear(4, 4), timeout=timedelta(seconds=float(sys.argv[1])))
engine = model._odc_engine
engine.barrier.timeout_s = float(sys.argv[2])
if engine.rank == 1:
    engine.replicas.sum = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
with minibatch(model, tokens=1):
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_a_script_ends_though_a_collective_does_not() -> None:
    """As scripts end that don't destroy the process group; it has a long deadline of its own."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", _SCRIPT, str(2 * LONG_S), str(SHORT_S)]
    started = []
    for rank in range(2):
        here = environment() | places | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ODC_HOST": f"host-{rank}"}
        started.append(subprocess.Popen(command, env=here, stderr=subprocess.PIPE, text=True))
    try:
        _, said = started[0].communicate(timeout=LONG_S)
    finally:
        for process in started:
            with process:  # closes its pipe
                process.kill()
    assert started[0].returncode == 1, said
    assert "rank 0 has waited" in said
    assert "for rank 1 at 'the sum over replicas'" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop", "cut"])
def test_a_fault_on_one_of_several_hosts_is_named_on_all(kind: str, tmp_path: Path) -> None:
    """One in each place, as `bench.suites.host_faults` has more of them."""
    namespaces.require()
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.suites.host_faults", "--faults=5", "--kinds", kind, f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=2 * LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["faults"]
    assert (found["tried"], found["named_in_time"], found["wrong"]) == (5, 5, 0)
    assert [row["place"] for row in found["rows"]] == ["forward", "backward", "exit", "sum", "exchange"]
