"""Split sequences, simulated: what pieces cost, who waits for whom, what crosses links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc_triton.balance.cost import CostModel
from odc_triton.balance.pieces import Piece
from odc_triton.base.trace import idle_fraction
from odc_triton.cli.command import main
from odc_triton.simulate.hardware import Links, find_device
from odc_triton.simulate.job import Job, assign_packs
from odc_triton.simulate.models import Model
from odc_triton.simulate.run import simulate
from odc_triton.simulate.study import make_job, rank_settings, usual_links
from tests.simulate.toys import toy

COST = CostModel(quadratic=1e-6, linear=1e-3, microbatch=0.5)
JOB = Job(links=Links.none(4), seconds=COST.pack, cost=COST, layers=4, prefetch=False, overlap=False)
CAP = 8000


def test_a_piece_costs_what_is_left_of_its_sequence() -> None:
    whole = JOB.pack_seconds([8000, 100])
    pieces = [[Piece(0, 0, 5000), 100], [Piece(0, 5000, 8000)]]
    assert sum(map(JOB.pack_seconds, pieces)) == pytest.approx(whole + 0.5)  # a microbatch more
    assert JOB.pack_seconds(pieces[1]) == pytest.approx(0.5 + COST.sequence(8000) - COST.sequence(5000))


def test_one_long_sample_is_every_ranks_share() -> None:
    outcome = simulate([[8000]], job=JOB, schedule="odc", balance="split", token_cap=CAP)
    share = COST.sequence(8000) / 4 + 0.5
    assert outcome.step_s == pytest.approx(share, rel=0.01)  # cut to whole tokens
    assert outcome.idle_share < 0.02
    mini = simulate([[8000]], job=JOB, schedule="odc", balance="mini", token_cap=CAP)
    assert mini.step_s == pytest.approx(COST.sequence(8000) + 0.5)


def test_ranks_of_a_wave_are_as_slow_as_the_slowest() -> None:
    assigned = [assign_packs([8000], ranks=4, token_cap=CAP, balance="split", cost=COST)]
    slow = replace(JOB, slow={2: 1.5})
    took = simulate([[8000]], job=slow, schedule="odc", balance="split", token_cap=CAP, assigned=assigned)
    plain = simulate([[8000]], job=JOB, schedule="odc", balance="split", token_cap=CAP, assigned=assigned)
    assert took.step_s == pytest.approx(1.5 * plain.step_s, rel=0.01)


def test_what_crosses_links_takes_its_time() -> None:
    model, kind = Model.find("qwen2.5-7b"), find_device("a100")
    times = []
    for gbs in (200.0, 2.0):
        job = make_job(model, kind, Links.switched(8, gbs))
        piece = Piece(0, 30_000, 40_000)
        alone = job.seconds([40_000]) - job.seconds([30_000])
        times.append(job.pack_seconds([piece]) - alone)
        moved = 28 * 4 * 128 * 16 * 30_000  # keys and values: read twice in bf16, added to in fp32
        assert 1 <= times[-1] / (moved / (gbs * 1e9)) < 2.5  # all ranks read at once
    assert times[1] == pytest.approx(100 * times[0], rel=0.05)


def test_waits_in_a_wave_and_transfers_are_not_work() -> None:
    """6 s and 2 s of work, 1 s in which the later piece's rank fetches keys and values; then 1 s more on that rank."""
    model = replace(toy([(2, 1)] * 2, root=(0, 1), cost=COST), kv_width=1000)
    links = Links.switched(2, 0.096, latency_s=0.0)  # of 6,000 tokens: 2 layers x 1,000 elements x 8 bytes
    job = replace(JOB, links=links, model=model, layers=2, seconds=lambda tokens: sum(tokens) / 1000)
    assigned = [[[[Piece(0, 0, 6000)]], [[Piece(0, 6000, 8000)], [1000]]]]
    how = {"schedule": "odc", "balance": "split", "token_cap": CAP, "timeline": True}
    outcome = simulate([[8000, 1000]], job=job, assigned=assigned, **how)
    near = {"abs": 1e-5}  # reads of parameters
    assert outcome.step_s == pytest.approx(7, **near)
    assert outcome.busy_s[0] == pytest.approx([6, 3], **near)
    assert outcome.exposed_s[0] == pytest.approx([0, 1], **near)
    assert outcome.waited_s[0] == pytest.approx([1, 3], **near)
    assert outcome.idle == pytest.approx([1 / 7, 4 / 7], **near)
    assert idle_fraction(outcome.events) == pytest.approx(5 / 14, **near)


def test_in_the_ranking_and_the_command(capsys: pytest.CaptureFixture) -> None:
    model, kind = Model.find("qwen2.5-0.5b"), find_device("a100")
    job = make_job(model, kind, usual_links(kind, 4))
    rows = rank_settings([60_000, 3000, 900, 4000], [1], job=job, token_cap=60_000, trials=2, split=True)
    assert rows[0].name == "ODC + LB-Split"
    assert rows[0].speedup > 2
    command = ["simulate", "--lengths", "aime", "--model", "qwen2.5-0.5b", "--trials", "2"]
    command += ["--minibatch", "1", "--split-sequences"]
    assert main([*command, "--token-cap", "9000"]) == 1  # FSDP2 takes no sample over the cap
    assert "longer than --token-cap 9000" in capsys.readouterr().err
    assert main(command) == 0
    assert "ODC + LB-Split" in capsys.readouterr().out
