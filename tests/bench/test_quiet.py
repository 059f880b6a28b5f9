"""Disturbed minibatches are noticed, measured anew by all variants, a few times at most, and told."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench import harness, quiet
from bench.harness import Measured, Minibatch, Work, compare, disturbed
from bench.variants import Odc, OdcSplit
from tests.bench.test_variants import CONFIG, cut_text
from tests.support import ranks


def _spin(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def _spin_beside(core: int, stop: object) -> None:
    os.sched_setaffinity(0, {core})
    while not stop.is_set():
        pass


def test_waiting_for_a_core_is_seen() -> None:
    """Two processes on one core: each waits for about half of the time."""
    allowed = os.sched_getaffinity(0)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    other = context.Process(target=_spin_beside, args=(min(allowed), stop), daemon=True)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        other.start()
        start_s, before_s = time.monotonic(), quiet.waited_s()
        _spin(0.4)
        seconds, waited_s = time.monotonic() - start_s, quiet.waited_s() - before_s
    finally:
        os.sched_setaffinity(0, allowed)
        stop.set()
        other.join()
    assert 0.05 < waited_s < seconds
    assert quiet.is_disturbed(seconds, [0.0, waited_s])
    assert not quiet.is_disturbed(seconds, [0.0, 0.01])


def counted(rank: int, world: int, work: Work, to_disturb: dict[int, int]) -> tuple[list[Measured], list[int]]:
    """`to_disturb`: how often split ODC's turn of a minibatch is disturbed, each time less. Also which were trained."""
    real, trained, left = harness.train_minibatch, [], dict(to_disturb)

    def train(variant: object, work: Work, data: object, cost: object, index: int, number: int) -> Minibatch:
        trained.append(index)
        waited_s = 0.0
        if isinstance(variant, OdcSplit) and left.get(index, 0):
            left[index] -= 1
            waited_s = 10.0 ** (6 + left[index])
        return replace(real(variant, work, data, cost, index, number), waited_s=[0.0, waited_s])

    harness.train_minibatch = train
    try:
        return compare((Odc, OdcSplit), work, warm_up=1), trained
    finally:
        harness.train_minibatch = real


# By minibatch how often it is disturbed: the repeats, and in how many it is disturbed even so. There may be two
# repeats, a quarter of six, and at most two of one minibatch.
CASES = [
    ({0: 1, 3: 9}, [0, 0, 0, 2, 0, 0, 0], 1),  # the first warms up
    ({1: 1, 3: 1, 5: 1, 6: 1}, [0, 1, 0, 1, 0, 0, 0], 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("to_disturb", "repeats", "left"), CASES)
def test_what_was_disturbed_is_measured_anew(
    to_disturb: dict[int, int], repeats: list[int], left: int, tmp_path: Path
) -> None:
    lengths = (40, 9, 17, 20, 30, 8, 12)
    work = Work(
        dataset=cut_text(tmp_path / "data.npz", lengths * 2),
        config=CONFIG,
        minibatches=[[index, index + 7] for index in range(7)],
        token_cap=128,
    )
    (odc, split), trained = ranks.run(counted, 2, work, to_disturb)[0]
    assert odc.repeats == split.repeats == repeats
    anew = [index for turn in (1, 2) for index, again in enumerate(repeats) if again >= turn]  # at the end
    assert trained == [index for index in [*range(7), *anew] for _ in range(2)]
    if 0 in to_disturb:
        assert split.waited_s[3][1] == 10.0**12, "the least disturbed counts"
    assert disturbed([odc, split], warm_up=1) == {"measured_anew": sum(map(bool, repeats)), "left": left}
    # Both trained the same samples as often.
    assert odc.losses == pytest.approx(split.losses, rel=1e-5)
    for result in (odc, split):
        assert len(result.seconds) == len(result.waited_s) == 7
        assert {event.minibatch for event in result.events} == set(range(7))
        # Of one turn only: events of two would span more than the minibatch.
        for index in range(7):
            found = [event for event in result.events if event.minibatch == index and event.label.startswith("enter")]
            assert len(found) == 2


def test_in_words() -> None:
    assert "was quiet" in quiet.in_words({"measured_anew": 0, "left": 0}, 8)
    assert "3 of 8 minibatches were measured anew" in quiet.in_words({"measured_anew": 3, "left": 0}, 8)
    assert "was not quiet: in 2 of 8" in quiet.in_words({"measured_anew": 3, "left": 2}, 8)
    unknown = Measured(name="a", balance="mini", seconds=[1.0], waited_s=[[math.nan]], repeats=[0])
    assert "not known" in quiet.in_words(disturbed([unknown]), 8)
