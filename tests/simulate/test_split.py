"""Split sequences, simulated: what segments cost, who waits for whom, what crosses links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc_triton.jobs.reports.trace import idle_fraction
from odc_triton.plan.cost import CostModel
from odc_triton.plan.entries import Segment
from odc_triton.plan.split import readable_tokens
from odc_triton.tools.memory.footprint import memory_plan
from odc_triton.tools.simulate.hardware import Links, find_device
from odc_triton.tools.simulate.job import Job, assign_packs
from odc_triton.tools.simulate.models import Model
from odc_triton.tools.simulate.run import simulate
from odc_triton.tools.simulate.study import make_job, rank_settings, usual_links
from tests.simulate.toys import toy

COST = CostModel(quadratic=1e-6, linear=1e-3, microbatch=0.5)
JOB = Job(links=Links.none(4), seconds=COST.pack, cost=COST, layers=4, prefetch=False, overlap=False)
CAP = 8000


def test_one_long_sample_is_every_ranks_share() -> None:
    outcome = simulate([[8000]], job=JOB, schedule="odc", balance="split", token_cap=CAP)
    share = COST.sequence(8000) / 4 + 0.5
    assert outcome.step_s == pytest.approx(share, rel=0.01)  # cut to whole tokens
    assert outcome.idle_share < 0.02
    mini = simulate([[8000]], job=JOB, schedule="odc", balance="mini", token_cap=CAP)
    assert mini.step_s == pytest.approx(COST.sequence(8000) + 0.5)


def test_memory_counts_keys_and_values_that_others_read() -> None:
    model, kind = Model.find("qwen2.5-7b"), find_device("h100")
    job = make_job(model, kind, usual_links(kind, 8, nodes=2))
    plans = [memory_plan(model.module, 8, replicas=2, backend="cuda", split_tokens=n) for n in (0, 20_000)]
    added = job.peak_bytes("odc", 1000, 20_000) - job.peak_bytes("odc", 1000)
    # The plan counts fp32 without a policy: 8 bytes in place of 2 + 4.
    assert added == pytest.approx((plans[1].total_bytes - plans[0].total_bytes) * 6 / 8, rel=0.01)
    lengths = [60_000, *[3000] * 15]
    rows = rank_settings(lengths, [1], job=job, token_cap=60_000, trials=1, split=True)
    how = {"ranks": 16, "replicas": 2, "token_cap": 60_000, "cost": model.cost}
    read = readable_tokens(lengths, samples=16, **how)
    packs = assign_packs(sorted(lengths), balance="split", split_tokens=read, **how)
    largest = max(sum(len(e) if isinstance(e, Segment) else e for e in pack) for own in packs for pack in own)
    assert largest > 60_000 / 8
    expected = job.peak_bytes("odc", largest, read)
    peaks = {row.name: row.outcome.peak_bytes for row in rows}
    assert peaks["ODC + LB-Split"] == pytest.approx(expected, rel=0.005)
    assert peaks["ODC + LB-Mini"] == job.peak_bytes("odc", 60_000)


def test_what_crosses_links_takes_its_time() -> None:
    model, kind = Model.find("qwen2.5-7b"), find_device("a100")
    times = []
    for gbs in (200.0, 2.0):
        job = make_job(model, kind, Links(gpus=8, gbs=gbs))
        segment = Segment(0, 30_000, 40_000)
        alone = job.seconds([40_000]) - job.seconds([30_000])
        times.append(job.pack_seconds([segment]) - alone)
        moved = 28 * 4 * 128 * 16 * 30_000  # keys and values: read twice in bf16, added to in fp32
        assert 1 <= times[-1] / (moved / (gbs * 1e9)) < 2.5  # all ranks read at once
    assert times[1] == pytest.approx(100 * times[0], rel=0.05)
    nodes = make_job(model, kind, Links(gpus=8, gbs=2.0, nodes=2, nic_gbs=0.1))
    assert nodes.kv_seconds([segment]) == times[1]  # they stay in the node


def test_waits_in_a_wave_and_transfers_are_not_work() -> None:
    """6 s and 2 s of work, 1 s in which the later segment's rank fetches keys and values; then 1 s more on that
    rank."""
    model = replace(toy([(2, 1)] * 2, root=(0, 1), cost=COST), kv_width=2 * 1000)
    links = Links(gpus=2, gbs=0.096, latency_s=0.0)  # of 6,000 tokens: 2 layers x 1,000 elements x 8 bytes
    job = replace(JOB, links=links, model=model, layers=2, seconds=lambda tokens: sum(tokens) / 1000)
    assigned = [[[[Segment(0, 0, 6000)]], [[Segment(0, 6000, 8000)], [1000]]]]
    how = {"schedule": "odc", "balance": "split", "token_cap": CAP, "timeline": True}
    outcome = simulate([[8000, 1000]], job=job, assigned=assigned, **how)
    near = {"abs": 1e-5}  # reads of parameters
    assert outcome.step_s == pytest.approx(7, **near)
    assert outcome.busy_s[0] == pytest.approx([6, 3], **near)
    assert outcome.exposed_s[0] == pytest.approx([0, 1], **near)
    assert outcome.waited_s[0] == pytest.approx([1, 3], **near)
    assert outcome.idle == pytest.approx([1 / 7, 4 / 7], **near)
    assert idle_fraction(outcome.events) == pytest.approx(5 / 14, **near)
