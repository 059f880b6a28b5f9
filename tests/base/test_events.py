"""Events and their log."""

from __future__ import annotations

import time

import pytest

from odc_triton.base.events import Event, EventLog, total_s


def test_an_event_becomes_a_row():
    event = Event(rank=1, kind="step", start_s=1.0, end_s=1.0, minibatch=3)
    assert Event.of_row(event.as_row()) == event


def test_the_log_stamps_and_forgets_the_oldest():
    log = EventLog(rank=2, capacity=2)
    log.minibatch, log.microbatch = 4, 1
    log.add("step", 0.0, 1.0)
    log.add("forward", 1.0, 2.0)
    log.add("wait", 2.0, 3.5, label="gradients landed", microbatch=-1)
    first, second = log.drain()
    assert first == Event(rank=2, kind="forward", start_s=1.0, end_s=2.0, minibatch=4, microbatch=1)
    assert (second.microbatch, second.label) == (-1, "gradients landed")
    assert log.drain() == []
    assert (total_s([first, second], "wait"), total_s([first, second], "step")) == (1.5, 0)


def test_a_span_is_recorded_also_when_it_raises():
    log = EventLog(rank=0)
    before_s = time.monotonic()
    with pytest.raises(KeyError), log.span("backward", microbatch=7):
        raise KeyError("x")
    (event,) = log.drain()
    assert before_s <= event.start_s <= event.end_s <= time.monotonic()
    assert (event.kind, event.microbatch) == ("backward", 7)
