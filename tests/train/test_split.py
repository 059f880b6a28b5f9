"""`train sft --split-sequences`: samples over the token cap train and are evaluated; a run goes on where it was."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from odc_triton.train.metrics import read_metrics
from odc_triton.train.sft_options import SftOptions
from tests.support import ranks
from tests.support.sft_case import case, write_case
from tests.train.test_resume import train

STEPS, STOP = 6, 2
CAP = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("split"), records=60, characters=300)


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    wanted = {"out": str(out), "steps": STEPS, "samples_per_rank": 2, "truncate": False, "eval_fraction": 0.2}
    return case(folder, **wanted | changes)


def losses(out: Path) -> list[float]:
    lines = read_metrics(out / "metrics.jsonl")
    return [line["loss"] for line in lines] + [lines[-1]["eval_loss"]]


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[float]:
    """Losses of one rank with room for whole samples."""
    assert ranks.run(train, 1, options(folder, folder / "whole", samples_per_rank=4), None) == ["ended"]
    return losses(folder / "whole")


@pytest.mark.parametrize("balance", ["mini", "queue"])
def test_as_without_splitting_and_stopped_in_the_middle(
    folder: Path, tmp_path: Path, whole: list[float], balance: str
) -> None:
    """Samples have up to twice the cap."""
    split = options(folder, tmp_path / "split", token_cap=CAP, split_sequences=True, balance=balance, resume="auto")
    assert set(ranks.run(train, 2, replace(split, samples_per_rank=2), STOP)) == {"stopped by SIGTERM"}
    assert ranks.run(train, 4, replace(split, samples_per_rank=1), None) == ["ended"] * 4
    # fp32 sums in another order, through six steps of AdamW.
    torch.testing.assert_close(losses(tmp_path / "split"), whole, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balance": "micro"}, "--split-sequences goes with --balance mini or queue; it is micro"),
        ({"split_sequences": False, "split_tokens": 9}, "--split-tokens is 9: give --split-sequences too"),
        ({"split_tokens": -1}, "--split-tokens is -1; it must be at least 0"),
    ],
)
def test_contradictions(folder: Path, changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options(folder, folder, **{"split_sequences": True} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_cap": 40}, "DataError.*more than the cap of 80; raise --token-cap"),
        (
            {"token_cap": 128, "split_tokens": 5},
            r"sample \d+ has .* over the token_cap of 128, and others may read 5 tokens .*pieces need",
        ),
    ],
)
def test_what_does_not_fit(folder: Path, tmp_path: Path, changes: dict, words: str) -> None:
    wanted = options(folder, tmp_path / "out", split_sequences=True, **changes)
    with ranks.start(train, 2, wanted, None) as job:
        outcomes = job.join()
    for outcome in outcomes:
        assert outcome.error is not None
        assert re.search(words, outcome.error), outcome.error
