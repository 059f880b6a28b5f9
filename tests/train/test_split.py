"""`train sft --split-sequences`: samples over the token cap train and are evaluated; a run goes on where it was."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import jobs, ranks
from tests.support.jobs import ENDED, STOPPED
from tests.support.sft_case import case, write_case

STEPS, STOP = 4, 1
CAP = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("split"), records=60, characters=300)


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    wanted = {"out": str(out), "steps": STEPS, "samples_per_rank": 2, "truncate": False, "eval_fraction": 0.2}
    return case(folder, **wanted | changes)


def losses(out: str) -> list[float]:
    lines = jobs.lines(out)
    return [line["loss"] for line in lines] + [lines[-1]["eval_loss"]]


def test_as_without_splitting_and_stopped_in_the_middle(folder: Path, tmp_path: Path) -> None:
    """Samples have up to twice the cap. Stopped on two ranks, goes on on four, by LB-Mini in two replicas; against one
    rank with room for whole samples.
    """
    alone = options(folder, tmp_path / "whole", samples_per_rank=4)
    assert jobs.run(1, alone) == [ENDED]
    how = {"token_cap": CAP, "split_sequences": True, "resume": "auto"}
    split = [options(folder, tmp_path / balance, balance=balance, **how) for balance in ("mini", "queue")]
    assert jobs.run(2, *split, stop_after=STOP) == [STOPPED] * 2
    mini, queue = (replace(each, samples_per_rank=1) for each in split)
    assert jobs.run(4, replace(mini, replicas=2), queue) == [ENDED] * 2
    for each in split:
        # fp32 sums in another order, through four steps of AdamW.
        torch.testing.assert_close(losses(each.out), losses(alone.out), rtol=1e-4, atol=0)


def test_what_does_not_fit(folder: Path, tmp_path: Path) -> None:
    """Nor do the longest samples to evaluate on, in the room that short ones to learn from need; there is more."""
    lines = sorted((folder / "data.jsonl").read_text().splitlines(keepends=True), key=len)
    (tmp_path / "short.jsonl").write_text("".join(lines[:8]))
    (tmp_path / "long.jsonl").write_text("".join(lines[-3:]))
    files = {"data": str(tmp_path / "short.jsonl"), "eval_data": str(tmp_path / "long.jsonl"), "eval_fraction": 0.0}
    changes = ({"token_cap": 40}, {"token_cap": CAP, "split_tokens": 5}, {"token_cap": CAP, "steps": 1, **files})
    wanted = [options(folder, tmp_path / f"{n}", split_sequences=True, **each) for n, each in enumerate(changes)]
    too_long, too_few, ended = jobs.run(2, *wanted)
    assert ended == ENDED
    assert re.match("DataError.*more than the cap of 80; raise --token-cap", too_long)
    said = r"ValueError: sample \d+ has .* over the token_cap of 128, and others may read 5 tokens .*pieces need"
    assert re.match(said, too_few)


def _on_hosts(rank: int, world: int, wanted: Sequence[SftOptions]) -> list[str]:
    os.environ["ODC_HOST"] = f"host-{rank * 2 // world}"
    return jobs.train(rank, world, wanted)


@pytest.mark.slow
def test_each_host_is_a_replica(folder: Path, tmp_path: Path) -> None:
    """With exact sums the same bits as by --replicas."""
    how = {"token_cap": CAP, "split_sequences": True, "samples_per_rank": 1, "exact": True}
    on_hosts, queue = (options(folder, tmp_path / name, balance=name, **how) for name in ("mini", "queue"))
    wanted = replace(on_hosts, out=str(tmp_path / "replicas"), replicas=2)
    assert jobs.run(4, wanted) == [ENDED]
    first, *others = ranks.run(_on_hosts, 4, [on_hosts, queue])
    assert others == [first] * 3
    assert first[0] == ENDED
    assert "--split-sequences goes with several replicas only by --balance mini" in first[1]
    assert losses(wanted.out) == losses(on_hosts.out)
    (alone,), _ = ranks.run(_on_hosts, 2, [replace(queue, balance="mini")])
    assert "there is a replica on each of 2 hosts, of one rank each, and --split-sequences splits" in alone
