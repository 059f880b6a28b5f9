"""Events and their log."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError

import pytest

from odc_triton.base.events import Event, EventLog, total_s


def test_an_event_is_checked_and_frozen():
    with pytest.raises(ValueError, match=r"kind is 'sleep'; it must be one of forward, .*, wait"):
        Event(rank=0, kind="sleep", start_s=0.0, end_s=1.0, minibatch=0)
    with pytest.raises(ValueError, match=r"step ends at 1\.0 s, before it starts at 2\.0 s"):
        Event(rank=0, kind="step", start_s=2.0, end_s=1.0, minibatch=0)
    event = Event(rank=1, kind="step", start_s=1.0, end_s=1.0, minibatch=3)
    assert Event.of_row(event.as_row()) == event
    assert (event.microbatch, event.label) == (-1, "")
    with pytest.raises(FrozenInstanceError):
        event.rank = 2


def test_the_log_stamps_rank_minibatch_and_microbatch():
    log = EventLog(rank=2)
    log.minibatch, log.microbatch = 4, 1
    log.add("forward", 1.0, 2.0)
    log.add("wait", 2.0, 3.5, label="gradients landed", microbatch=-1)
    first, second = log.drain()
    assert first == Event(rank=2, kind="forward", start_s=1.0, end_s=2.0, minibatch=4, microbatch=1)
    assert (second.microbatch, second.label) == (-1, "gradients landed")
    assert log.drain() == []


def test_a_full_log_forgets_the_oldest():
    log = EventLog(rank=0, capacity=3)
    for start_s in range(5):
        log.add("step", start_s, start_s + 1.0)
    assert len(log) == 3
    assert [event.start_s for event in log.drain()] == [2, 3, 4]


def test_a_span_is_recorded_also_when_it_raises():
    log = EventLog(rank=0)
    before_s = time.monotonic()
    with pytest.raises(KeyError), log.span("backward", microbatch=7):
        raise KeyError("x")
    (event,) = log.drain()
    assert before_s <= event.start_s <= event.end_s <= time.monotonic()
    assert (event.kind, event.microbatch) == ("backward", 7)


def test_total_counts_the_given_kinds_only():
    log = EventLog(rank=0)
    for kind, seconds in (("wait", 1.0), ("step", 2.0), ("forward", 4.0), ("wait", 8.0)):
        log.add(kind, 0.0, seconds)
    events = log.drain()
    assert total_s(events, "wait", "forward") == 13.0
    assert total_s(events) == 0
