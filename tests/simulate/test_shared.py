"""Shared prefixes, simulated: what is computed once, what ranks read of each other, minibatches of whole families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from odc_triton.jobs.data.dataset import DataSummary, TokenizedDataset
from odc_triton.plan.cost import CostModel
from odc_triton.plan.entries import Piece
from odc_triton.tools.cli.command import main
from odc_triton.tools.simulate.hardware import Links, find_device
from odc_triton.tools.simulate.job import Job, SharedPack, assign_packs
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
    prompt, rest = COST.sequence(3999), COST.piece(3999, 4500)
    assert step_s(JOB) == pytest.approx(prompt + 2 * rest)
    assert step_s(JOB, split_tokens=4000) == pytest.approx((prompt + 4 * rest) / 2, rel=0.02)
    assert step_s(replace(JOB, slow={1: 2.0}), split_tokens=4000) == pytest.approx(prompt + 4 * rest, rel=0.02)
    with pytest.raises(ValueError, match="balance 'shared' needs to know what the samples share: give relatives"):
        simulate([LENGTHS], job=JOB, schedule="odc", balance="shared", token_cap=10_000)
    with pytest.raises(ValueError, match="balance 'shared' under schedule 'fsdp'"):
        simulate([LENGTHS], job=JOB, schedule="fsdp", balance="shared", token_cap=10_000)


def test_what_a_pack_reads_of_others() -> None:
    """Siblings read the same rows once; rows of the own pack are not read. Packs that share nothing are no wave."""
    packs = assign_packs(LENGTHS, relatives=RELATIVES, split_tokens=4000, **HOW)
    (first,), (second,) = packs
    (prompt,) = first
    assert (first.wave, first.fetched) == (0, 0)
    assert len(second) == 4
    assert (second.wave, second.fetched) == (0, len(prompt))
    model = Model.find("qwen2.5-7b")
    job = make_job(model, find_device("h100"), usual_links(find_device("h100"), 2))
    alone = SharedPack(second)
    assert job.kv_seconds(alone) == 0
    assert job.kv_seconds(second) == pytest.approx(job.kv_seconds([Piece(0, second.fetched, second.fetched + 1)]))
    for pack in (p for of in assign_packs(LENGTHS, relatives=RELATIVES, **HOW) for p in of):
        assert (pack.wave, pack.fetched) == (None, 0)


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


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main(["simulate", "--model", "qwen2.5-1.5b", "--gpus", "2", *map(str, arguments)])
        except (SystemExit, ValueError) as left:
            return 2, "", str(left) + capsys.readouterr().err
        return status, *capsys.readouterr()

    return run


def test_the_command(say: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, out, _ = say(
        *("--lengths", "chat", "--minibatch", 8, "--trials", 1),
        *("--share-prefixes", "--group", 8, "--prompt-tokens", 9000),
    )
    assert status == 0
    assert "after prompts of 9,000, each 8 times: mean 10," in out
    assert "ODC + shared prefixes is " in out
    tokens = np.concatenate([np.r_[np.full(300, at // 4 + 1), np.full(20, at + 50)] for at in range(16)]).astype(
        np.int32
    )
    ends = np.arange(17) * 320
    spans = np.stack([ends[:-1] + 300, ends[1:]], axis=1)
    summary = DataSummary(records=16, samples=16, tokens=len(tokens))
    TokenizedDataset(tokens, ends, spans, summary).save(tmp_path / "data.npz")
    status, out, _ = say("--lengths", tmp_path / "data.npz", "--minibatch", 4, "--share-prefixes", "--trials", 1)
    assert status == 0
    assert "| ODC + shared prefixes " in out
    (tmp_path / "lengths.txt").write_text("50\n" * 20)
    for arguments, error in (
        (("--lengths", "chat", "--share-prefixes"), "--share-prefixes: --lengths chat has no tokens to compare"),
        (("--lengths", tmp_path / "lengths.txt", "--share-prefixes"), "give the .npz of prepared data"),
        (("--lengths", "chat", "--group", 8), "--group, --prompt-tokens and --share-prefixes: give all three"),
        (("--lengths", "chat", "--group", 0), "--group is 0; give at least 1"),
    ):
        status, _, err = say(*arguments)
        assert status != 0
        assert error in err
