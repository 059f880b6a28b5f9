"""Recorded events with known times, for tests of what is drawn of them."""

from __future__ import annotations

from odc_triton.base.events import Event


def span(rank, kind, start_s, end_s, minibatch=0, microbatch=-1, label=""):
    return Event(
        rank=rank, kind=kind, start_s=start_s, end_s=end_s, minibatch=minibatch, microbatch=microbatch, label=label
    )


def odc_like(minibatches=2, start_s=50.0):
    """Rank 0 works 3 s of each 4, then waits 1 s; both pass a barrier at 4 s, step until 4.5 s, and pass another."""
    events = []
    for minibatch in range(minibatches):
        t = start_s + 5 * minibatch
        for rank, busy_s in ((0, 3.0), (1, 4.0)):
            events += [
                span(rank, "forward", t, t + 1, minibatch, 0),
                span(rank, "backward", t + 1, t + busy_s, minibatch, 0),
                span(rank, "publish", t + 1.5, t + 2, minibatch, 0),
                span(rank, "wait", t + busy_s, t + 4, minibatch, label="gradients landed"),
                span(rank, "step", t + 4, t + 5, minibatch),
                span(rank, "wait", t + 5, t + 5, minibatch, label="parameters readable"),
            ]
    return events
