"""Simulates one setting: a schedule and a balance, on given links, over given minibatches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...plan.entries import Segment
from ...plan.queue import QUEUE, queue_packs
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
    sizes_of,
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
        links = job.links
        sent = job.model.sent(links.gpus) if job.model else [0] * (job.layers + 1)
        moved = links.read_s if schedule == "odc" else links.collective_s
        trained = job.model.sent(links.gpus, trained=True) if job.model and not job.alone else [0] * len(sent)
        added = [REDUCE_BYTES * each for each in trained]
        added_s = [moved(each) if each else 0.0 for each in added]
        across_s = [2 * links.replicas_s(each / links.gpus) * (schedule != "odc") for each in added]
        return cls(
            read=[moved(COMPUTE_BYTES * each) for each in sent],
            add=added_s,
            last_add=[each_s + more_s for each_s, more_s in zip(added_s, across_s, strict=True)],
        )


def simulate(
    minibatches: Sequence[Sequence[int]],
    *,
    job: Job,
    schedule: str,
    balance: str,
    token_cap: int,
    timeline: bool = False,
    assigned: list[list[Packs]] | None = None,
    split_tokens: int = 0,
) -> Outcome:
    """The outcome of one setting. Each of `minibatches` is one trial; all ranks enter it together.

    Ranks with fewer microbatches than others join FSDP's collectives with empty ones.

    minibatches: tokens of every sample of all ranks.
    job: machine and model.
    schedule: "fsdp", "fsdp-no-reshard" or "odc".
    balance: one of `BALANCES`.
    token_cap: the most tokens of a microbatch.
    timeline: keep the first trial's events.
    assigned: by minibatch, all ranks' packs, if they are known.
    split_tokens: of those, the most tokens that others read, whose memory is counted.

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
    if balance == QUEUE:
        how = {"ranks": job.ranks, "token_cap": token_cap, "cost": job.cost}
        assigned = [_taken([[sizes_of(pack, m)] for pack in queue_packs(m, **how)], job, moves) for m in minibatches]
    elif assigned is None:
        how = {"ranks": job.ranks, "replicas": job.replicas, "token_cap": token_cap, "cost": job.cost}
        assigned = [assign_packs(m, balance=balance, split_tokens=split_tokens, **how) for m in minibatches]
    lanes = _run(assigned, schedule, job, moves, recorder)
    shape = (len(minibatches), job.ranks)
    over, busy, exposed, waited = (
        np.broadcast_to(value, shape) for value in (lanes.compute, lanes.busy, lanes.exposed, lanes.waited)
    )
    last = last_rank(over)
    tail = job.tail_s(schedule)
    if recorder:
        recorder.finish(over[0], float(last[0, 0]), job.barrier_s, tail)
    tokens = max(
        sum(len(each) if isinstance(each, Segment) else each for each in pack)
        for trial in assigned
        for packs in trial
        for pack in packs
    )
    return Outcome(
        schedule=schedule,
        seconds=(entry_s + last + job.barrier_s)[:, 0] + tail,
        busy_s=busy,
        exposed_s=exposed,
        waited_s=waited + (last - over) + entry_s + job.barrier_s,
        tail_s=tail,
        microbatches=[[len(packs) for packs in trial] for trial in assigned],
        peak_bytes=job.peak_bytes(schedule, tokens, split_tokens),
        events=recorder.events if recorder else [],
    )


def simulate_runs(runs: Sequence[Sequence[Sequence[int]]], *, job: Job, token_cap: int) -> Outcome:
    """Runs, of which each has minibatches, over one base, of a `job` that is `alone`: the rank that is free first takes
    the next run, costliest first. Seconds are those of all runs over the number of their minibatches, as if in turn.
    """
    how: dict[str, Any] = {"ranks": 1, "token_cap": token_cap, "balance": "mini", "cost": job.cost}
    queue = [[pack for lengths in run for pack in assign_packs(lengths, **how)[0]] for run in runs]
    queue.sort(key=lambda packs: -sum(map(job.cost.pack, packs)))
    minibatches = [lengths for run in runs for lengths in run]
    taken = _taken(queue, job, _Moves.of(job, "odc"))
    told = simulate(minibatches[:1], job=job, schedule="odc", balance="mini", token_cap=token_cap, assigned=[taken])
    count, steps = len(minibatches), -(-len(runs) // job.ranks) * max(map(len, runs))  # of all, of a rank
    parts = {name: getattr(told, name) / count for name in ("busy_s", "exposed_s", "waited_s")}
    seconds = (told.seconds + (steps - 1) * told.tail_s) / count
    return replace(told, seconds=seconds, tail_s=steps * told.tail_s / count, **parts)


def _taken(queue: Sequence[Packs], job: Job, moves: _Moves) -> list[Packs]:
    """Each rank's packs of the queue, whose entries have one or more: the rank that is free first takes the next."""
    taken: list[Packs] = [[] for _ in range(job.ranks)]
    free = [(0.0, rank) for rank in range(job.ranks)]
    moved_s = sum(2 * read_s + add_s for read_s, add_s in zip(moves.read, moves.add, strict=True))
    for packs in queue:
        since_s, rank = heapq.heappop(free)
        taken[rank] += packs
        for pack in packs:
            work_s = job.seconds(pack) * job.slowness[rank]
            since_s += max(work_s, moved_s) if job.prefetch and job.overlap else work_s + moved_s
        heapq.heappush(free, (since_s, rank))
    return taken


def _run(assigned: list[list[Packs]], schedule: str, job: Job, moves: _Moves, recorder: EventRecorder | None) -> Lanes:
    """Runs each rank's microbatches in order, all ranks of all trials at once."""
    counts = np.array([[len(packs) for packs in trial] for trial in assigned])
    work, shares = _work(assigned, int(counts.max()), job)
    odc = schedule == "odc"
    lanes = Lanes(
        np.zeros(counts.shape),
        prefetch=job.prefetch,
        overlap=job.overlap,
        sm_share=0.0 if odc else job.links.sm_share,
        record=recorder.record if recorder else None,
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
            _forward(lanes, seconds, job, moves, sync, reads=1.0 if index == 0 else None)
            _backward(lanes, seconds * (index < last), job, moves, None, reads=None, adds=None, final=False)
        else:
            _forward(lanes, seconds, job, moves, sync, reads=there)
            _backward(lanes, seconds, job, moves, sync, reads=there, adds=there, final=final)
    if keep:
        seconds = np.take_along_axis(work, last[None], axis=0)[0]
        _backward(lanes, seconds, job, moves, sync, reads=None, adds=1.0, final=True)
    lanes.drain()
    return lanes


def _work(assigned: list[list[Packs]], most: int, job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each microbatch (microbatches, trials, ranks), and which shares of them are computing and moving keys
    and values (microbatches, 2, trials, ranks). Ranks that compute segments of one sequence wait for each other in
    every layer, those of another replica don't.
    """
    work = np.zeros((most, len(assigned), job.ranks))
    shares = np.stack([np.ones_like(work), np.zeros_like(work)], axis=1)
    for trial, ranks in enumerate(assigned):
        waves: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, packs in enumerate(ranks):
            work[: len(packs), trial, rank] = [job.pack_seconds(pack) for pack in packs]
            for index, pack in enumerate(packs):
                wave = pack.wave if isinstance(pack, SharedPack) else index
                if wave is not None and any(isinstance(each, Segment) for each in pack):
                    waves.setdefault((wave, rank // job.links.gpus), []).append((index, rank))
        for places in waves.values():
            moved = np.array([job.kv_seconds(ranks[rank][index]) for index, rank in places])
            at, of = map(list, zip(*places, strict=True))
            own, slowest = work[at, trial, of], work[at, trial, of].max()
            shares[at, :, trial, of] = np.stack([own - moved, moved], axis=-1) / slowest
            work[at, trial, of] = slowest
    return work * job.slowness, shares


def _forward(
    lanes: Lanes, seconds: Clock, job: Job, moves: _Moves, sync: Callable | None, *, reads: Clock | None
) -> None:
    """The root, which takes no time, and the blocks. `reads`: 1 for ranks that read parameters, 0 for ranks without
    work.
    """
    each = seconds * (job.forward_share / job.layers)
    for unit, read_s in enumerate(moves.read):
        lanes.unit(each * (unit > 0), "forward", read_s=None if reads is None else reads * read_s, sync=sync)


def _backward(
    lanes: Lanes,
    seconds: Clock,
    job: Job,
    moves: _Moves,
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
        lanes.unit(each, "backward", read_s=read, add_s=None if adds is None else adds * add_s, sync=sync)
    if adds is not None:
        lanes.unit(seconds * 0.0, "backward", add_s=adds * root[1], sync=sync)
