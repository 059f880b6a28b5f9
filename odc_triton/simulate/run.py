"""Simulates one setting: a schedule and a balance, on given links, over given minibatches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..balance.pieces import Piece
from ..balance.queue import QUEUE
from .job import (
    ALL_BALANCES,
    COMPUTE_BYTES,
    REDUCE_BYTES,
    SCHEDULES,
    SHARED,
    SPLIT,
    Job,
    Packs,
    SharedPack,
    assign_packs,
    queue_packs,
)
from .lanes import Clock, EventRecorder, Lanes, Outcome, last_rank


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """Seconds of one transfer of the root's bytes, then of each block's."""

    read: list[float]
    add: list[float]
    last_add: list[float]  # of the last microbatch, where FSDP2 also reduces over the nodes

    @classmethod
    def of(cls, job: Job, schedule: str) -> _Moves:
        links, hybrid = job.links, job.hybrid

        @cache
        def moved(n_bytes: int, *, last: bool = False) -> float:
            if job.model is None:
                return 0.0
            if schedule == "odc":
                return links.read_s(n_bytes, hybrid=hybrid)
            across = 2 * links.replicas_s(n_bytes / links.gpus) if last and hybrid else 0.0
            return links.collective_s(n_bytes, hybrid=hybrid) + across

        sent = job.model.sent(job.shards) if job.model else [0] * (job.layers + 1)
        return cls(
            read=[moved(COMPUTE_BYTES * each) for each in sent],
            add=[moved(REDUCE_BYTES * each) for each in sent],
            last_add=[moved(REDUCE_BYTES * each, last=True) for each in sent],
        )

    def of_rank(self, rank: int) -> _Moves:
        """The rank's own, as floats."""

        def own(clock: Clock) -> float:
            return float(clock if isinstance(clock, float) else clock[rank])

        return _Moves(**{name: list(map(own, clocks)) for name, clocks in vars(self).items()})


def simulate(
    minibatches: Sequence[Sequence[int]],
    *,
    job: Job,
    schedule: str,
    balance: str,
    token_cap: int,
    seed: int = 0,
    timeline: bool = False,
    assigned: list[list[Packs]] | None = None,
    split_tokens: int = 0,
) -> Outcome:
    """Each of `minibatches` (tokens of every sample of all ranks) is one trial; all ranks enter it together.

    Ranks with fewer microbatches than others join FSDP's collectives with empty ones. `timeline`: keep the first
    trial's events. `seed`: for the jitter. `assigned`: results of `assign_packs` by minibatch, if known, and
    `split_tokens` as there, whose memory is counted. The same arguments give the same outcome.

    Raises ValueError for an unknown schedule or balance, "queue" under FSDP, no minibatch, and as `assign`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if balance not in ALL_BALANCES:
        raise ValueError(f"balance is {balance!r}: choose one of {', '.join(ALL_BALANCES)}")
    if balance in (QUEUE, SPLIT, SHARED) and schedule != "odc":
        raise ValueError(
            f"balance {balance!r} under schedule {schedule!r}: FSDP's ranks need the same number of microbatches; use "
            f"'odc'"
        )
    if not minibatches:
        raise ValueError("there are no minibatches: give at least one list of lengths")
    entry_s = job.barrier_s if schedule == "odc" else 0.0
    recorder = EventRecorder(job.ranks, entry_s) if timeline else None
    moves = _Moves.of(job, schedule)
    noise = _noise(job, seed)
    if balance == QUEUE:
        lanes, assigned = _run_queue(minibatches, job, moves, token_cap, noise, recorder)
    else:
        if assigned is None:
            how = {"ranks": job.ranks, "replicas": job.replicas, "token_cap": token_cap, "cost": job.cost}
            assigned = [assign_packs(m, balance=balance, split_tokens=split_tokens, **how) for m in minibatches]
        lanes = _run(assigned, schedule, job, moves, noise, recorder)
    shape = (len(minibatches), job.ranks)
    over, busy, exposed, waited = (np.broadcast_to(value, shape) for value in lanes)
    last = last_rank(over)
    tail = job.tail_s(schedule)
    seconds = (entry_s + last + job.barrier_s)[:, 0] + tail
    if recorder:
        recorder.finish(over[0], float(last[0, 0]), job.barrier_s, tail)
    tokens = max(
        sum(len(each) if isinstance(each, Piece) else each for each in pack)
        for trial in assigned
        for packs in trial
        for pack in packs
    )
    return Outcome(
        schedule=schedule,
        balance=balance,
        seconds=seconds,
        busy_s=busy,
        exposed_s=exposed,
        waited_s=waited + (last - over) + entry_s + job.barrier_s,
        tail_s=tail,
        microbatches=[[len(packs) for packs in trial] for trial in assigned],
        peak_bytes=job.peak_bytes(schedule, tokens, split_tokens),
        events=recorder.events if recorder else [],
    )


Totals = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # over, busy, exposed, waited: (trials, ranks) each


def _run(
    assigned: list[list[Packs]], schedule: str, job: Job, moves: _Moves, noise: _Noise, recorder: EventRecorder | None
) -> Totals:
    """Runs each rank's microbatches in order, all ranks of all trials at once."""
    counts = np.array([[len(packs) for packs in trial] for trial in assigned])
    work = np.zeros((int(counts.max()), *counts.shape))
    shares = np.stack([np.ones_like(work), np.zeros_like(work)], axis=1)  # of computing, of moving keys and values
    for trial, ranks in enumerate(assigned):
        for rank, packs in enumerate(ranks):
            work[: len(packs), trial, rank] = [job.pack_seconds(pack) for pack in packs]
        # Ranks that compute pieces of one sequence wait for each other in every layer, those of another replica don't.
        waves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, packs in enumerate(ranks):
            for index, pack in enumerate(packs):
                wave = pack.wave if isinstance(pack, SharedPack) else index
                if wave is not None and any(isinstance(each, Piece) for each in pack):
                    waves.setdefault((wave, rank * job.replicas // job.ranks), []).append((index, rank))
        for places in waves.values():
            moved = np.array([job.kv_seconds(ranks[rank][index]) for index, rank in places])
            at, of = map(list, zip(*places, strict=True))
            own, slowest = work[at, trial, of], work[at, trial, of].max()
            shares[at, :, trial, of] = np.stack([own - moved, moved], axis=-1) / slowest
            work[at, trial, of] = slowest
    work *= job.slowness
    odc = schedule == "odc"
    lanes = Lanes(
        np.zeros(counts.shape),
        prefetch=job.prefetch,
        overlap=job.overlap,
        sm_share=0.0 if odc else job.links.sm_share,
        record=recorder.of_all if recorder else None,
    )
    sync = None if odc else last_rank
    last = np.maximum(counts - 1, 0)
    keep = schedule == "fsdp-no-reshard"
    for index, seconds in enumerate(work):
        lanes.shares = shares[index, 0], shares[index, 1]
        if recorder:
            recorder.microbatch = index
        there = (index < counts).astype(float) if odc else 1.0  # under FSDP a rank without work still participates
        final = index == len(work) - 1
        if keep:
            _forward(lanes, seconds, job, moves, noise, sync, reads=1.0 if index == 0 else None)
            _backward(lanes, seconds * (index < last), job, moves, noise, None, reads=None, adds=None, final=False)
        else:
            _forward(lanes, seconds, job, moves, noise, sync, reads=there)
            _backward(lanes, seconds, job, moves, noise, sync, reads=there, adds=there, final=final)
    if keep:
        if recorder:
            recorder.microbatch = len(work) - 1
        seconds = np.take_along_axis(work, last[None], axis=0)[0]
        _backward(lanes, seconds, job, moves, noise, sync, reads=None, adds=1.0, final=True)
    lanes.drain()
    return lanes.compute, lanes.busy, lanes.exposed, lanes.waited


def _run_queue(
    minibatches: Sequence[Sequence[int]],
    job: Job,
    moves: _Moves,
    token_cap: int,
    noise: _Noise,
    recorder: EventRecorder | None,
) -> tuple[Totals, list[list[Packs]]]:
    """The first free rank takes the next pack; not vectorised over ranks, as the order depends on the run."""
    totals = np.zeros((4, len(minibatches), job.ranks))
    assigned: list[list[Packs]] = []
    own = [moves.of_rank(rank) for rank in range(job.ranks)]
    for trial, lengths in enumerate(minibatches):
        record = recorder if trial == 0 else None
        lanes = [
            Lanes(
                0.0,
                prefetch=job.prefetch,
                overlap=job.overlap,
                sm_share=0.0,
                record=record.of_rank(rank) if record else None,
            )
            for rank in range(job.ranks)
        ]
        taken: list[Packs] = [[] for _ in lanes]
        free = [(0.0, rank) for rank in range(job.ranks)]
        for pack in queue_packs(lengths, ranks=job.ranks, token_cap=token_cap, cost=job.cost):
            _, rank = heapq.heappop(free)
            if record:
                record.microbatch = len(taken[rank])
            seconds = job.seconds(pack) * float(job.slowness[rank])
            _forward(lanes[rank], seconds, job, own[rank], noise, None, reads=1.0)
            _backward(lanes[rank], seconds, job, own[rank], noise, None, reads=1.0, adds=1.0, final=False)
            taken[rank].append(pack)
            heapq.heappush(free, (lanes[rank].compute, rank))
        for rank, lane in enumerate(lanes):
            lane.drain()
            totals[:, trial, rank] = lane.compute, lane.busy, lane.exposed, lane.waited
        assigned.append(taken)
    return (totals[0], totals[1], totals[2], totals[3]), assigned


def _forward(
    lanes: Lanes, seconds: Clock, job: Job, moves: _Moves, noise: _Noise, sync: Callable | None, *, reads: Clock | None
) -> None:
    """The root, which takes no time, and the blocks. `reads`: 1 for ranks that read parameters, 0 for ranks without
    work.
    """
    each = seconds * (job.forward_share / job.layers)
    for unit, read_s in enumerate(moves.read):
        work_s = noise(each) if unit else seconds * 0.0
        lanes.unit(work_s, "forward", read_s=None if reads is None else reads * read_s, sync=sync)


def _backward(
    lanes: Lanes,
    seconds: Clock,
    job: Job,
    moves: _Moves,
    noise: _Noise,
    sync: Callable | None,
    *,
    reads: Clock | None,
    adds: Clock | None,
    final: bool,
) -> None:
    each = seconds * ((1 - job.forward_share) / job.layers)
    root, *blocks = zip(moves.read, moves.last_add if final else moves.add, strict=True)
    for read_s, add_s in reversed(blocks):
        read = None if reads is None else reads * read_s
        lanes.unit(noise(each), "backward", read_s=read, add_s=None if adds is None else adds * add_s, sync=sync)
    if adds is not None:
        lanes.unit(seconds * 0.0, "backward", add_s=adds * root[1], sync=sync)


_Noise = Callable[[Clock], Clock]


def _noise(job: Job, seed: int) -> _Noise:
    """Multiplies each unit's seconds by a factor of mean 1."""
    if not job.jitter:
        return lambda seconds: seconds
    generator = np.random.default_rng(seed)
    deviation = math.sqrt(math.log1p(job.jitter**2))

    def noisy(seconds: Clock) -> Clock:
        shape = None if isinstance(seconds, float) else seconds.shape
        factor = generator.lognormal(-(deviation**2) / 2, deviation, shape)
        return seconds * (float(factor) if shape is None else factor)

    return noisy
