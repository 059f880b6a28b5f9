"""Disturbed minibatches are noticed, measured anew by all variants, a few times at most, and told."""

from __future__ import annotations

import math
import multiprocessing
import os
import time

from bench import quiet
from bench.harness import Measured, disturbed


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


def test_in_words() -> None:
    assert "was quiet" in quiet.in_words({"measured_anew": 0, "left": 0}, 8)
    assert "3 of 8 minibatches were measured anew" in quiet.in_words({"measured_anew": 3, "left": 0}, 8)
    assert "was not quiet: in 2 of 8" in quiet.in_words({"measured_anew": 3, "left": 2}, 8)
    unknown = Measured(name="a", balance="mini", seconds=[1.0], waited_s=[[math.nan]], repeats=[0])
    assert "not known" in quiet.in_words(disturbed([unknown]), 8)
