"""What goes wrong between segments of a hybrid's samples: every rank hears the cause, or names the rank that is
gone."""

from __future__ import annotations

import re
import signal

import pytest

from tests.sequence.test_failures import assert_cause_alone, fails_once
from tests.sequence.test_parity import assert_alike
from tests.sequence.test_stops import Stop, _said_by_others
from tests.support import ranks
from tests.support.splitting import DEALS, Setup, run

pytestmark = pytest.mark.slow
ROWS, STATES = 0, 1  # of the first layer, in the exchange
HYBRID = Setup(family="qwen3_5", deal="zigzag")
FAULTS = [
    ("raised", HYBRID, "rank 1: OutOfMemoryError: no memory for 3 GiB"),
    ("constant", HYBRID, "rank 1: RuntimeError: tokens 8..19 of sample 0 had no backward, and other ranks wait for it"),
    ("skipped", HYBRID, "rank 1: RuntimeError: tokens 8..19 of sample 0 were not computed, and other ranks need them"),
    ("twice", HYBRID, "rank 1: RuntimeError: tokens 8..19 of sample 0 had a backward already, and other ranks"),
]


def test_every_rank_hears_the_cause_alone() -> None:
    found = ranks.run_all(3, *((fails_once, fault, setup, 1) for fault, setup, _ in FAULTS))
    for (*_, words), of_ranks in zip(FAULTS, found, strict=True):
        assert_cause_alone(of_ranks, words)


GONE = {
    "before its rows": ("publish", ROWS, r"rows of tokens 8\.\.19 of sample 0 in layer 0"),
    "before its states": ("publish", STATES, r"states of tokens 8\.\.19 of sample 0 in layer 0"),
    "before it adds to states": ("begin_adding", STATES, r"gradients of states of .* from tokens 8\.\.19 .*layer 0"),
    "before it adds to rows": ("begin_adding", ROWS, r"gradients of rows of .* from tokens 8\.\.19 .*layer 0"),
}


@pytest.mark.parametrize("backend", ["cpu", "cpu-sharded"])
@pytest.mark.parametrize("where", GONE)
def test_a_killed_rank_is_named(where: str, backend: str) -> None:
    at, layer, awaited = GONE[where]
    stop = Stop(deal=DEALS["zigzag"], where=at, victim=1, layer=layer, signal=signal.SIGKILL, family="qwen3_5")
    found = _said_by_others(stop, backend)
    assert any(re.search(awaited, said) for said, _ in found), found
    for said, blamed in found:
        assert said.startswith("RankLost: "), said
        assert blamed == [1], said


def test_a_rank_that_stands_still_is_named() -> None:
    stop = Stop(deal=DEALS["zigzag"], where="publish", victim=1, layer=STATES, family="nemotron_h")
    for said, blamed in _said_by_others(stop, "cpu"):
        assert said.startswith("DeadlineExceeded: "), said
        assert blamed == [1], said


def test_replicas_split_their_own_samples() -> None:
    setups = [Setup(family=name, deal="2x2", replicas=2) for name in ("qwen3_5", "nemotron_h")]
    for setup, outcomes in zip(setups, ranks.run_all(4, *((run, setup) for setup in setups)), strict=True):
        assert_alike(setup, outcomes)
