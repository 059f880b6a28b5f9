"""Ranks that compute while others sample: one is killed, a reward fails, a stop comes during or after the sampling."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from odc_triton.comm.barrier import Barrier
from odc_triton.jobs.rl.overlap import OverlappedRollout
from odc_triton.jobs.train import grpo
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.plan.counter import Log
from tests.support import jobs, ranks
from tests.support.grpo_case import Recorded, case, write_prompts
from tests.support.jobs import STOPPED, lines
from tests.support.sft_case import VOCABULARY

NAMED_S = 30.0  # on a busy machine; the job's deadline is ten times as long
WHILE_IT_SAMPLES = {"killed while it samples": signal.SIGKILL, "stopped while it samples": signal.SIGTERM}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("overlap"))


def options(folder: Path, out: Path, **changes: Any) -> GrpoOptions:
    return case(folder, out=str(out), overlap_rollout="on", prompts_per_rank=2, decode_at_once=3, steps=2, **changes)


def after(first: Callable[[], None], function: Callable) -> Callable:
    return lambda *given, **named: (first(), function(*given, **named))[1]


def dies_in_free(log: Log, message: dict, write: Callable = Log.write) -> None:
    """Its place in the log is taken, and stays empty."""
    if "free" in message:
        log._store.add(log._key, 1)
        signal.raise_signal(signal.SIGKILL)
    write(log, message)


def strike_after(waits: Path, number: int) -> None:
    """Once rank 0 has computed what there is, and waits."""
    while not waits.exists():
        time.sleep(0.005)
    signal.raise_signal(number)


def stops_after_the_last(own: OverlappedRollout, made: dict, came: Callable = OverlappedRollout._came) -> None:
    came(own, made)
    if not own._arrivals.left:
        signal.raise_signal(signal.SIGTERM)


def disturbed(rank: int, world: int, of: dict[str, GrpoOptions]) -> list[str]:
    """How each job ended on this rank. By its name: what happens to rank 1."""
    ends, wait_for, came = [], Barrier.wait_for, OverlappedRollout._came
    for name, wanted in of.items():
        waits, engine = Path(wanted.out) / "waits", Recorded(VOCABULARY)
        if rank == 0:
            Barrier.wait_for = after(waits.touch, wait_for)
        elif name in WHILE_IT_SAMPLES:
            engine.generate = after(partial(strike_after, waits, WHILE_IT_SAMPLES[name]), engine.generate)
        elif name == "stopped after the last completion":
            OverlappedRollout._came = stops_after_the_last
        elif name == "killed in a message":
            Log.write = dies_in_free
        grpo._engine = lambda *_, engine=engine: engine
        ends += jobs.train(rank, world, [wanted])
        OverlappedRollout._came = came
    return ends


def test_a_stop_and_a_reward_that_fails(folder: Path, tmp_path: Path) -> None:
    """In one launch. Exact sums never fit the first guess of their scales: a stop goes before the repetition."""
    during = options(folder, tmp_path / "during", exact=True)
    of = {"stopped while it samples": during, "stopped after the last completion": options(folder, tmp_path / "after")}
    of["a reward raises"] = options(folder, tmp_path / "reward", reward=("tests.rewards:raising",))
    for during, after, failed in ranks.run(disturbed, 2, of):
        assert (during, after) == (STOPPED, STOPPED)
        assert re.match(r"RolloutFailed: .*\(rank .* reward tests.rewards:raising raised KeyError", failed)
    assert [len(lines(tmp_path / name)) for name in ("during", "after", "reward")] == [0, 1, 0]


@pytest.mark.parametrize("name", ["killed while it samples", "killed in a message"])
def test_a_rank_is_killed(folder: Path, tmp_path: Path, name: str) -> None:
    """The other one waits for its completions, or for its message."""
    with ranks.start(disturbed, 2, {name: options(folder, tmp_path / "out", share_prefixes="off")}) as job:
        first, second = job.join(NAMED_S)
    assert (first.error, second.signal) == (None, signal.SIGKILL)
    assert re.match("RankLost: rank 0 was waiting for '.*': rank 1 died", first.value[0])
