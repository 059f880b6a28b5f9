"""`serving`: around work in which ranks read each other's frozen shards, and wait for each other only at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..base.errors import OfRanks, in_a_line
from .minibatch import protocol_of

_PURPOSE = "the end of `serving`: ranks that are done serve their shards to the others"


@contextmanager
def serving(model: nn.Module) -> Iterator[None]:
    """Around the work of ranks that share the frozen shards of `model`, each at its own pace. Collective.

        with serving(model):
            train(model, my_adapter)  # or evaluate, or generate; ranks end in any order

    Inside, forward, backward, `minibatch` and `evaluate` are this rank's own, and wait for no other. At its end a rank
    waits until all ranks are there, as they may still read its shards. While one works it shows signs of life, so it
    may take any time; one that shows none is late after the `timeout` of fully_shard. An exception is printed at once
    and raised after that wait. Ctrl-C and `sys.exit` end the other ranks' work too.

    Raises RankLost if a peer's process is gone, DeadlineExceeded for a silent one; ValueError or RuntimeError for a
    model that trains sharded parameters, and inside of another `serving` of it.
    """
    engine = protocol_of(model)
    if trained := [shard.name for shard in engine.trainable()]:
        raise ValueError(f"serving is for a frozen model, and this one trains {trained[0]}: serve its base")
    if engine.is_serving:
        raise RuntimeError("serving inside of serving: ranks would take the ends of one for those of the other")
    engine.is_serving = True
    try:
        with engine.barrier.working():
            yield
    except Exception as error:
        if not engine.is_broken:
            words = f"rank {engine.rank} failed and serves its shards until the others are done: {in_a_line(error)}"
            if not isinstance(error, OfRanks):  # which follows another rank's, who has printed it
                print(words, file=sys.stderr, flush=True)
            for each in engine.borrowers:  # their groups must not wait for this rank
                each.abort(error)
            engine.exchange(_PURPOSE, {})
        raise
    except BaseException as error:
        engine.abort(error)
        raise
    else:
        engine.exchange(_PURPOSE, {})
    finally:
        engine.is_serving = False
