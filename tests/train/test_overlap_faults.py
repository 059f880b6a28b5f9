"""Ranks that compute while others sample: one is killed, a reward fails, a stop comes during or after the sampling."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from odc_triton.balance.counter import Log
from odc_triton.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.rl.learned import Learned
from odc_triton.rl.overlap import OverlappedRollout
from odc_triton.train.grpo_options import GrpoOptions
from tests.support import jobs, ranks
from tests.support.deadlines import LONG_S
from tests.support.grpo_case import Recorded, case, write_prompts
from tests.support.jobs import STOPPED, lines
from tests.support.sft_case import VOCABULARY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("overlap"))


def options(folder: Path, out: Path, **changes: Any) -> GrpoOptions:
    return case(folder, out=str(out), overlap_rollout="on", prompts_per_rank=2, decode_at_once=3, steps=2, **changes)


def then(function: Callable, act: Callable[..., None]) -> Callable:
    def called(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        act(*given)
        return found

    return called


def strike(number: int) -> None:
    os.kill(os.getpid(), number)


def dies_in_free(log: Log, message: dict, write: Callable = Log.write) -> None:
    """Its place in the log is taken, and stays empty."""
    if "free" in message:
        log._store.add(log._key, 1)
        strike(signal.SIGKILL)
    write(log, message)


class Waiting(Recorded):
    """Rank 1's: samples once rank 0 has computed a pack; then it gets a signal."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(VOCABULARY)
        self._path, self._number = path, number

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        deadline_s = time.monotonic() + LONG_S
        while not self._path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        strike(self._number)
        return super().generate(requests, options)


def disturbed(rank: int, world: int, of: dict[str, GrpoOptions]) -> list[str]:
    """How each job ended on this rank. By its name: what happens to rank 1."""
    from odc_triton.train import grpo

    ends, loss, came = [], Learned.loss, OverlappedRollout._came
    for name, wanted in of.items():
        computed = Path(wanted.out) / "computed"
        signals = {"killed while it samples": signal.SIGKILL, "stopped while it samples": signal.SIGTERM}
        waiting = rank == 1 and name in signals
        engine = Waiting(computed, signals[name]) if waiting else Recorded(VOCABULARY)
        grpo._engine = lambda *_, engine=engine: engine
        Learned.loss = then(loss, lambda *_, computed=computed: computed.touch()) if rank == 0 else loss
        if rank == 1 and name == "stopped after the last completion":
            OverlappedRollout._came = then(came, lambda own, _: own._arrivals.left or strike(signal.SIGTERM))
        if rank == 1 and name == "killed in a message":
            Log.write = dies_in_free
        ends += jobs.train(rank, world, [wanted])
        OverlappedRollout._came = came
    return ends


def test_a_stop_and_a_reward_that_fails(folder: Path, tmp_path: Path) -> None:
    """Exact sums do not fit the first guess of their scales: what was left out may not be taken for a repetition."""
    of = {
        "stopped while it samples": options(folder, tmp_path / "during", exact=True),
        "stopped after the last completion": options(folder, tmp_path / "after"),
        "a reward raises": options(folder, tmp_path / "reward", reward=("tests.rewards:raising",)),
    }
    for during, after, failed in ranks.run(disturbed, 2, of):
        assert (during, after) == (STOPPED, STOPPED)
        assert failed.startswith("RolloutFailed: a rollout failed (rank ")
        assert "reward tests.rewards:raising raised KeyError: 'nothing known of 3'" in failed
    assert [len(lines(tmp_path / name)) for name in ("during", "after", "reward")] == [0, 1, 0]


@pytest.mark.parametrize("name", ["killed while it samples", "killed in a message"])
def test_a_rank_is_killed(folder: Path, tmp_path: Path, name: str) -> None:
    """The other one waits for its completions, and has a long deadline."""
    start_s = time.monotonic()
    with ranks.start(disturbed, 2, {name: options(folder, tmp_path / "out")}) as job:
        first, second = job.join(20)
    assert second.signal == signal.SIGKILL
    assert first.error is None, first.error
    assert first.value[0].startswith("RankLost: rank 0 was waiting for"), first.value
    assert "rank 1 died" in first.value[0]
    assert time.monotonic() - start_s < LONG_S / 2
