"""Publishing weights: an owner makes its shards readable and says so; other ranks wait for that, and then read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..comm.memory.heap import Status
from .member import Member
from .minibatch import Participant
from .shard import Shard, copy_masters, refuse_edited

_POLL_S = 1e-3


class Publication(Participant):
    """This rank's shards as readers see them, and its count of weight updates, which they wait for.

    `number`: weight updates so far; 0 before the first. `max_lag_s`: how long readers outside of the job may delay the
    next one.
    """

    name = "publication"

    def __init__(self, engine: Member) -> None:
        self._engine, self._barrier, heap = engine, engine.barrier, engine.heap
        self.published = Status(heap)  # how many times the rank has published its shards
        self.stepping = Status(heap)  # one more while the rank may be writing its shards
        self.pinned = Status(heap)  # the first rank's: the last weight update that such readers let pass; 0: any
        self.max_lag_s = 0.0
        self.check: Callable[[], None] = lambda: None  # raises if such readers would not read what the model is
        self.follow: Callable[[], None] = lambda: None  # finds the shards that the model has now
        self.number = 0
        self._announced = 0
        self._reading = 0  # the weight update that an evaluation reads

    def _of_owners(self, status: Status) -> Iterable[tuple[int, int]]:
        """(rank, status) of the owners that this rank reads: those of its own replica."""
        return enumerate(status.seen(), self._engine.heap.first)

    def announce(self) -> None:
        """Announces that this rank may write its shards from here on: readers must not miss it."""
        self.check()
        if self._announced == self.number:
            deadline_s = time.monotonic() + self.max_lag_s
            while 0 < self.pinned.seen()[0] <= self.number and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        self._announced = self.number + 1
        self.stepping.show(self.number + 1)

    def complete(self) -> None:
        """Announces that this rank's shards are readable as they are now."""
        self.number += 1
        self.published.show(self.number)

    def entry(self, given: None) -> int:
        return self.number

    def entered(self, messages: list[int]) -> None:
        """All ranks continue from the highest number, with everything published."""
        self.number = self._announced = max(messages)
        self.published.show(self.number)
        self.stepping.show(self.number)

    @property
    def _is_of_all_replicas(self) -> bool:
        """True if each replica publishes only its parts of the shards, so that publishing needs all replicas."""
        return self._engine.replicas.count > 1 and any(len(each.compute_parts()) > 1 for each in self._engine.shards)

    def prepare(self) -> None:
        """Before a minibatch: masters are readable, also those written by hand, if no other replica has a part."""
        if self._is_of_all_replicas:
            refuse_edited(self._engine.shards)
        else:
            copy_masters(self._engine.shards, self._engine.streams.first)

    def publish(self, *, stepped: bool = False) -> None:
        """Makes this rank's shards readable as they are now, and shows it. Called after every optimizer step.

        With replicas all ranks call it, as each has a part of every replica's shards. `stepped`: called by an
        optimizer's step, so frozen parameters are unchanged.
        """
        engine = self._engine
        self.follow()
        engine.refuse_in_child("publish")
        if engine.is_open:
            raise RuntimeError("parameters can't be published inside a minibatch: peers are reading them")
        self.announce()  # before the copies
        with engine.events.span("publish", microbatch=-1):
            if not self._is_of_all_replicas:
                copy_masters(engine.shards, engine.streams.first)
            else:
                with engine.collective():
                    shards = engine.trainable() if stepped else engine.shards
                    copy_masters(shards, engine.streams.first)
                    engine.drain("publishing the local part of the parameters")
                    engine.replicas.gather([shard.compute_parts() for shard in shards])
            engine.drain("publishing the parameters")
        self.complete()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Parameters are written inside of it, and published at its end; after an error they are readable as they are.

        Announces it first, as processes outside of the job may be reading.
        """
        self._engine.refuse_in_child("writing the parameters")
        self.announce()
        try:
            yield
        except BaseException:
            self.complete()
            raise
        self.publish()

    def wait_readable(self) -> None:
        """Before this rank reads outside of a minibatch. Raises RuntimeError if it has edited what others read."""
        refuse_edited(self._engine.shards)
        self.wait()

    def full_parameters(self, some: Sequence[Shard] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, a copy of the whole tensor in the compute dtype), one at a time, of all shards or `some`; no other
        rank takes part.
        """
        engine, published, shards = self._engine, self.number, self._engine.shards if some is None else some
        if not engine.is_open:
            refuse_edited(shards)
        for shard in shards:
            if not engine.is_open:
                self.wait()
            whole = shard.read()
            engine.drain("reading whole parameters")
            if not engine.is_open:
                self.check_not_torn()
            if self.number != published:
                raise RuntimeError("the parameters were stepped or published during this read: read them again")
            yield shard.name, whole

    def wait(self) -> None:
        """Waits until every owner has published as often as this rank has."""
        mine = self._reading = self.number
        self._barrier.wait_until(
            f"publication {mine} of the parameters",
            lambda: [rank for rank, count in self._of_owners(self.published) if count < mine],
        )

    def check_not_torn(self) -> None:
        """Raises if an owner may have stepped while this rank was reading outside of a minibatch."""
        ahead = [rank for rank, count in self._of_owners(self.stepping) if count > self._reading]
        if ahead:
            raise RuntimeError(
                f"ranks {ahead} stepped or published while rank {self._barrier.rank} was still reading the "
                f"parameters: evaluate after this rank's own optimizer.step(), and call publish(model) on all ranks or "
                f"on none"
            )
