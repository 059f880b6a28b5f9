"""Sums over all tokens of samples whose segments are on several ranks, for losses that need them, such as ratios of
sequences; and over all tokens of groups of samples (`Samples.groups`), such as pairs. Each rank writes its part into
memory of the host, also on GPUs, and waits for the others'.

[Note: a wait between forward and backward] A rank writes its parts when the forward of its pack is done, before it
waits for any. The forward needs other ranks' forwards alone, so every rank of the wave writes; and none is in its
backward, where ranks wait for additions, before it has. So in [Note: waves] in plan/segments.py
attend(last layer) < write < wait < all of the backward, and waits still can't form a circle. Ranks that compute nothing
of the wave's samples are not asked. A group over ranks is of one wave, as a tree is, also if none of its segments reads
another; of one that is in one pack the plan has no segments, and its rank waits for none.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..base.errors import PeerFailed, RanksDiffer
from ..comm.layout import place_regions
from ..comm.memory.heap import SharedMemoryHeap
from ..engine.api import engine_of
from ..plan.entries import Segment
from ..plan.segments import PlannedSegment
from .enable import at_least_1
from .exchange import SequenceExchange

_MOST = 2  # sums of a sample, or group
_SHOWN_S = 0.1  # peers see longer waits


class SampleSums:
    """Sums over the tokens of samples, or groups of them, that several ranks compute. Collective.

    model: what `enable_split` was called on.
    samples: more than any number of a sample in a plan, which takes host memory: number those of a minibatch from 0.

    Raises ValueError without `enable_split`, and for a number below 1; RanksDiffer for other `samples` on other ranks.
    """

    def __init__(self, model: nn.Module, *, samples: int) -> None:
        self._state = state = engine_of(model, "SampleSums")
        exchange = state.participant(SequenceExchange)
        if exchange is None:
            raise ValueError("SampleSums are of split samples: call enable_split(model, tokens=…) first")
        self._exchange = exchange
        samples = at_least_1("samples", samples, "more than any number of a sample")
        near, barrier = exchange.buffers.heap, state.barrier
        self._rank, self._first, self._world = near.rank, near.first, barrier.world
        everyones = state.exchange("sums over segments", {"token": uuid.uuid4().hex, "samples": samples})
        for rank, theirs in enumerate(everyones):
            if theirs["samples"] != samples:
                raise RanksDiffer(
                    f"SampleSums: samples is {samples} on rank {state.rank} and {theirs['samples']} on rank {rank}"
                )
        # Of a sample and rank: the number of the plan once its sums are there, then these.
        (region,), size_bytes = place_regions(
            [((samples, near.world, 1 + _MOST), "float64", 8)], world=near.world, apart=False
        )
        heap = SharedMemoryHeap(
            rank=near.rank,
            world=near.world,
            size_bytes=size_bytes,
            token=f"{everyones[0]['token']}-{near.first}",
            timeout_s=barrier.timeout_s,
        )
        self._heap, self._parts = heap, heap.whole(region)
        self._waits = barrier.status()  # the last wave whose parts the rank has written, and for whom it waits
        barrier.blocked_on.append(self.blocked_on)

    def over_ranks(
        self, own: Mapping[int, torch.Tensor], counts: Callable[[Segment], bool], group_of: Callable[[int], int] = int
    ) -> dict[int, torch.Tensor]:
        """By sample, sums over the tokens of all ranks: of `own`, 1 or 2 of each sample [k], in fp64, which are over
        this rank's tokens. They have the same bits on all ranks, and no gradients. `group_of`: of a sample, for sums by
        group.

            chosen, rejected = found[pair]  # of [-3.0, 0.0] and [-1.0, -2.5] both ranks get [-4.0, -2.5]
            logp = own[pair] + (found[pair] - own[pair]).detach()  # gradients of this rank's tokens

        A loss made of these is there on each of the ranks: report it on one, or divided among them.

        Each rank with a segment that `counts` calls it with that sample, or group, once in a microbatch, after the
        forward. Waits for the device if there is one. Raises RankLost, DeadlineExceeded, PeerFailed, which name rank
        and sample, and ValueError for a group that is planned as several.
        """
        plan, sync = self._exchange.plan, self._exchange.sync
        segments = () if plan is None else [each for each in plan.segments if group_of(each.segment.sample) in own]
        others = [each for each in segments if each.rank != self._rank and counts(each.segment)]
        if not others:
            return {**own}
        if len({each.wave for each in segments}) > 1:
            raise ValueError(f"samples of groups {[*own]} are in several waves: make the plan with these groups")
        self._state.drain("the forward of segments")
        places: dict[int, int] = {}  # of a group's parts: at its first sample with segments, on all ranks
        ranks: dict[int, set[int]] = {}
        for each in segments:
            places.setdefault(group_of(each.segment.sample), each.segment.sample)
            if counts(each.segment):
                ranks.setdefault(group_of(each.segment.sample), set()).add(each.rank)
        for group, place in places.items():
            self._parts[place, self._rank, 1 : 1 + len(own[group])] = own[group].cpu()
            self._parts[place, self._rank, 0] = sync.number
        wave = sync.number << 16 | others[0].wave + 1
        self._show(wave)
        for each in others:
            self._wait_for(each, places[group_of(each.segment.sample)], wave)
        found = {group: self._parts[places[group], sorted(of), 1:].sum(0) for group, of in ranks.items()}
        return {group: found[group][: len(each)].to(each) if group in found else each for group, each in own.items()}

    def _wait_for(self, other: PlannedSegment, place: int, wave: int) -> None:
        rank, sync = self._first + other.rank, self._exchange.sync
        purpose, shown_s = f"the sums over {other.segment}", time.monotonic() + _SHOWN_S

        def missing() -> list[int]:
            if self._parts[place, other.rank, 0] == sync.number:
                return []
            if time.monotonic() >= shown_s:
                self._show(wave, rank)
            sync.require_none_failed(purpose)
            return [rank]

        with self._state.events.span("wait", label=purpose):
            try:
                self._state.barrier.wait_until(purpose, missing)
            except PeerFailed:
                self._show(wave)
                raise
        self._show(wave)

    def _show(self, wave: int, rank: int = -1) -> None:
        self._waits.show(wave * (self._world + 1) + rank + 1)

    def blocked_on(self, rank: int) -> int | None:
        """As `ShownWaits.blocked_on`: a wait is over if the other rank has written its parts of that wave."""
        shown = [divmod(number, self._world + 1) for number in self._waits.seen()]
        wave, other = shown[rank]
        return other - 1 if other and shown[other - 1][0] < wave else None
