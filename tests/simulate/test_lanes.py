"""The simulated clocks against closed forms, and what must hold of any of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.balance import CostModel, assign, queue_packs
from odc_triton.jobs.reports.trace import barriers, idle_fraction, segments
from odc_triton.tools.simulate.hardware import Links
from odc_triton.tools.simulate.job import SCHEDULES, Job
from odc_triton.tools.simulate.run import simulate, simulate_runs
from tests.simulate.toys import toy

COST = CostModel(quadratic=1e-8, linear=1e-4)
BLOCKS = [(8, 500_000)] * 3
TINY = toy(BLOCKS, root=(8, 250_000), cost=COST)
ROOTLESS = toy(BLOCKS, root=(0, 1), cost=COST)
CAP = 10_000
LENGTHS = st.lists(st.integers(1, CAP), min_size=4, max_size=40)


def a_job(ranks: int, *, links: Links | None = None, **options: object) -> Job:
    """Communication without time, a barrier at every layer, unless told otherwise."""
    strict = {"prefetch": False, "overlap": False, "layers": 3}
    return Job(links=links or Links.none(ranks), seconds=COST.pack, cost=COST, **{**strict, **options})


def lengths_of(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(10, CAP) for _ in range(count)]


def packs_of(lengths: Sequence[int], ranks: int, balance: str) -> list[list[float]]:
    """Seconds of each rank's microbatches."""
    dealt = assign(lengths, ranks=ranks, token_cap=CAP, balance=balance, cost=COST)
    return [[COST.pack(lengths[i] for i in members) for members in packs] for packs in dealt]


def fsdp_s(work: list[list[float]], slow: dict[int, float]) -> float:
    """The paper's: the sum over microbatches of the slowest rank's, every layer alike."""
    longest = max(map(len, work))
    return sum(max(packs[m] * slow.get(r, 1) for r, packs in enumerate(work) if m < len(packs)) for m in range(longest))


def odc_s(work: list[list[float]], slow: dict[int, float]) -> float:
    """The paper's: the rank with most to do."""
    return max(sum(packs) * slow.get(r, 1) for r, packs in enumerate(work))


@settings(max_examples=40)
@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 4),
    factor=st.sampled_from([1.0, 1.3]),
    balance=st.sampled_from(["local", "mini"]),
)
def test_closed_forms_without_communication(lengths: list[int], ranks: int, factor: float, balance: str) -> None:
    job, slow = a_job(ranks, slow={0: factor}), {0: factor}
    work = packs_of(lengths, ranks, balance)
    told = {s: simulate([lengths], job=job, schedule=s, balance=balance, token_cap=CAP) for s in SCHEDULES}
    # fp64 sums in another order
    assert told["fsdp"].step_s == pytest.approx(fsdp_s(work, slow), rel=1e-9)
    assert told["odc"].step_s == pytest.approx(odc_s(work, slow), rel=1e-9)
    assert told["odc"].step_s <= told["fsdp"].step_s * (1 + 1e-9)
    assert told["odc"].step_s <= told["fsdp-no-reshard"].step_s * (1 + 1e-9)
    for outcome in told.values():
        # Work is conserved: every pack is computed once, and every second of a rank is accounted for.
        for rank, packs in enumerate(work):
            assert outcome.busy_s[0, rank] == pytest.approx(sum(packs) * slow.get(rank, 1), rel=1e-9, abs=1e-12)
        parts = outcome.busy_s + outcome.exposed_s + outcome.waited_s
        assert parts == pytest.approx(np.broadcast_to(outcome.seconds[:, None], parts.shape), rel=1e-9)
        assert (outcome.exposed_s == 0).all()


@settings(max_examples=40)
@given(lengths=LENGTHS, ranks=st.integers(1, 4), gbs=st.floats(0.05, 500), nodes=st.sampled_from([1, 2]))
def test_every_second_is_accounted_for_with_communication(
    lengths: list[int], ranks: int, gbs: float, nodes: int
) -> None:
    links = Links(gpus=ranks, gbs=gbs, nodes=nodes, nic_gbs=gbs / 2)
    job = a_job(ranks, links=links, model=TINY, prefetch=True, overlap=True, barrier_s=0.01, memory_gbs=1000)
    for schedule in SCHEDULES:
        for balance in ("mini", "queue") if schedule == "odc" else ("mini",):
            told = simulate([lengths, lengths[:1]], job=job, schedule=schedule, balance=balance, token_cap=CAP)
            parts = told.busy_s + told.exposed_s + told.waited_s + told.tail_s
            assert parts == pytest.approx(np.broadcast_to(told.seconds[:, None], parts.shape), rel=1e-9)
            assert min(told.exposed_s.min(), told.waited_s.min()) >= -1e-12
            assert told.busy_s[0].sum() == pytest.approx(sum(map(COST.sequence, lengths)), rel=1e-9)
            idle_s = (told.exposed_s + told.waited_s).sum(axis=0)
            assert told.idle == pytest.approx(idle_s / told.seconds.sum(), rel=1e-9, abs=1e-12)


def test_reads_hide_behind_compute_and_compute_behind_reads() -> None:
    """One rank reads from one peer, one microbatch in equal units: the pipeline of two buffers in closed form."""
    lengths = [5000, 5000]
    work_s = COST.sequence(5000)
    for gbs in (1000.0, 0.01):
        links = Links(gpus=2, gbs=gbs, latency_s=0.0)
        job = a_job(2, links=links, model=ROOTLESS, prefetch=True, overlap=True)
        read_s, add_s = (4_000_000 * n / 2 / (gbs * 1e9) for n in (2, 4))
        told = simulate([lengths], job=job, schedule="odc", balance="mini", token_cap=CAP)
        forward, backward = work_s / 9, 2 * work_s / 9
        if gbs > 1:  # compute bound: the first read and the last add show
            assert max(read_s, add_s) < forward
            assert told.step_s == pytest.approx(read_s + work_s + add_s, rel=1e-9)
            assert told.exposed_s[0, 0] == pytest.approx(read_s + add_s, rel=1e-6)
        else:  # link bound: reads up to the first backward, then adds
            assert min(read_s, add_s) > 2 * backward
            assert told.step_s == pytest.approx(4 * read_s + backward + 3 * add_s, rel=1e-9)


@settings(max_examples=50)
@given(lengths=LENGTHS, ranks=st.integers(1, 5), factor=st.sampled_from([1.0, 1.3]))
def test_whoever_is_free_takes_the_next_pack_of_the_queue(lengths: list[int], ranks: int, factor: float) -> None:
    job = a_job(ranks, slow={ranks - 1: factor})
    told = simulate([lengths], job=job, schedule="odc", balance="queue", token_cap=CAP)
    clocks = [0.0] * ranks
    for pack in queue_packs(lengths, ranks=ranks, token_cap=CAP, cost=COST):
        taker = clocks.index(min(clocks))
        clocks[taker] += COST.pack(lengths[i] for i in pack) * (factor if taker == ranks - 1 else 1)
    assert told.step_s == pytest.approx(max(clocks), rel=1e-9)


def test_runs_over_one_base_wait_for_no_rank() -> None:
    """Of 9, 5, 3 and 2 seconds: the longest first, so the other rank has 5 + 3 + 2. Then reads, and no adds."""
    second = CostModel(quadratic=0, linear=1)
    job = Job(links=Links.none(2), seconds=second.pack, cost=second, layers=3, alone=True)
    told = simulate_runs([[[2]], [[5]], [[3]], [[4, 3], [2]]], job=job, token_cap=5)
    assert [told.step_s, *told.busy_s[0]] == pytest.approx([10 / 5, 9 / 5, 10 / 5])
    links = Links(gpus=2, gbs=0.01, latency_s=0.0)
    job = a_job(2, links=links, model=ROOTLESS, prefetch=True, overlap=True, alone=True)
    told, last_s = simulate_runs([[[5000]] * 2] * 2, job=job, token_cap=CAP), 2 * COST.sequence(5000) / 9
    assert told.step_s == pytest.approx(2 * (6 * 4_000_000 / (0.01 * 1e9) + last_s) / 4, rel=1e-9)


@pytest.mark.parametrize(("schedule", "balance"), [(s, "mini") for s in SCHEDULES] + [("odc", "queue")])
def test_the_timeline_says_what_the_outcome_says(schedule: str, balance: str) -> None:
    links = Links(gpus=4, gbs=2.0)
    job = a_job(4, links=links, model=TINY, prefetch=True, overlap=True, barrier_s=0.05, memory_gbs=1.0)
    lengths = lengths_of(12)
    told = simulate([lengths], job=job, schedule=schedule, balance=balance, token_cap=CAP, timeline=True)
    assert {event.rank for event in told.events} == set(range(4))
    assert max(event.end_s for event in told.events) == pytest.approx(told.step_s, rel=1e-9)
    assert idle_fraction(told.events) == pytest.approx(told.idle_share, abs=1e-9)
    for rank, spans in segments(told.events).items():
        busy = sum(s.end_s - s.start_s for s in spans if s.state in ("forward", "backward"))
        assert busy == pytest.approx(told.busy_s[0, rank], rel=1e-9)
    if schedule == "odc":
        assert [barrier.label for barrier in barriers(told.events)] == ["enter", "exit"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "ddp"}, "schedule is 'ddp': choose one of fsdp, fsdp-no-reshard, odc"),
        ({"balance": "best"}, "balance is 'best': choose one of mini, queue, micro, global, local"),
        ({"schedule": "fsdp", "balance": "queue"}, "'queue' under schedule 'fsdp'"),
        ({"schedule": "fsdp", "balance": "split"}, "'split' under schedule 'fsdp': FSDP's ranks need the same number"),
        ({"minibatches": []}, "give at least one list"),
        ({"minibatches": [[5, 0]]}, r"lengths\[1\] is 0"),
        ({"minibatches": [[5, CAP + 1]]}, "10001 tokens, over the token_cap of 10000"),
    ],
)
def test_what_is_refused(change: dict, message: str) -> None:
    wanted = {"minibatches": [[5]], "job": a_job(1), "schedule": "odc", "balance": "mini", "token_cap": CAP, **change}
    minibatches = wanted.pop("minibatches")
    with pytest.raises(ValueError, match=message):
        simulate(minibatches, **wanted)
