"""`train sft --split-sequences`: what does not fit. How it trains is in test_jobs and test_split_replicas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import jobs
from tests.support.jobs import ENDED
from tests.support.sft_case import case, write_case

CAP = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("split"), records=60, characters=300)


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    wanted = {"out": str(out), "steps": 4, "samples_per_rank": 2, "truncate": False, "eval_fraction": 0.2}
    return case(folder, **wanted | changes)


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
    said = r"ValueError: sample \d+ has .* over the token_cap of 128, and others may read 5 tokens .*segments need"
    assert re.match(said, too_few)
