"""Shared prefixes, simulated: what is computed once, what ranks read of each other, minibatches of whole families."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc_triton.plan.cost import CostModel
from odc_triton.tools.simulate.hardware import Links, find_device
from odc_triton.tools.simulate.job import Job, assign_packs
from odc_triton.tools.simulate.models import Model
from odc_triton.tools.simulate.run import simulate
from odc_triton.tools.simulate.study import SETTINGS, grouped, make_job, rank_settings, usual_links

COST = CostModel(quadratic=1e-6, linear=1e-3)
JOB = Job(links=Links.none(2), seconds=COST.pack, cost=COST, layers=4, prefetch=False, overlap=False)
LENGTHS, RELATIVES = grouped([500] * 4, prompt=4000, group=4)
HOW = {"ranks": 2, "token_cap": 10_000, "balance": "shared", "cost": COST}


def step_s(job: Job, **how: object) -> float:
    packs = assign_packs(LENGTHS, relatives=RELATIVES, **HOW | how)
    return simulate([LENGTHS], job=job, schedule="odc", balance="shared", token_cap=10_000, assigned=[packs]).step_s


def test_a_group_on_two_ranks() -> None:
    """Each repeats the prompt; with room for keys and values they share it, and are as slow as the slower."""
    prompt, rest = COST.sequence(3999), COST.segment(3999, 4500)
    assert step_s(JOB) == pytest.approx(prompt + 2 * rest)
    assert step_s(JOB, split_tokens=4000) == pytest.approx((prompt + 4 * rest) / 2, rel=0.02)
    assert step_s(replace(JOB, slow={1: 2.0}), split_tokens=4000) == pytest.approx(prompt + 4 * rest, rel=0.02)
    with pytest.raises(ValueError, match="balance 'shared' needs to know what the samples share: give `relatives`"):
        simulate([LENGTHS], job=JOB, schedule="odc", balance="shared", token_cap=10_000)
    with pytest.raises(ValueError, match="balance 'shared' under schedule 'fsdp'"):
        simulate([LENGTHS], job=JOB, schedule="fsdp", balance="shared", token_cap=10_000)


def test_every_setting_gets_minibatches_of_whole_families() -> None:
    lengths, relatives = grouped([500 + at // 4 for at in range(64)], prompt=4000, group=4)
    job = make_job(Model.find("qwen2.5-1.5b"), find_device("h100"), usual_links(find_device("h100"), 2))
    how = {"job": job, "token_cap": 16_384, "trials": 2}
    rows = {row.name: row.outcome for row in rank_settings(lengths, [4], relatives=relatives, **how)}
    assert rows.keys() == {*SETTINGS, "ODC + shared prefixes"}
    # Two groups on two ranks: each computes one prompt of four.
    assert rows["ODC + LB-Mini"].step_s / rows["ODC + shared prefixes"].step_s > 2
    assert rows["ODC + shared prefixes"].peak_bytes is not None
    assert rank_settings(lengths, [4], **how)[0].name != "ODC + shared prefixes"
