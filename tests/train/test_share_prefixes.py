"""`train sft --share-prefixes`: what it says that it saves, and what is refused. How it trains is in test_jobs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from odc_triton.hf import PackingUnsupported
from odc_triton.jobs.train.model import build_model
from odc_triton.jobs.train.run_folder import require_same
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import jobs
from tests.support.families import config_of, make_new_positions
from tests.support.sft_case import case, write_questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("share"))


def options(folder: Path, **changes: object) -> SftOptions:
    return case(folder, **{"steps": 1, "share_prefixes": True} | changes)


def test_what_it_saves_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Without it samples come in another order: that is another run."""
    wanted = options(folder, out=str(tmp_path / "out"), truncate=False)
    assert jobs.train(0, 1, [wanted]) == [jobs.ENDED]
    said = r"--share-prefixes saves (\d+) of (\d+) tokens, (\d+)% of the time, at most\n"
    found = re.search(said, capsys.readouterr().out)
    assert 0.3 < int(found[1]) / int(found[2]) < 0.4
    with pytest.raises(ValueError, match="--share-prefixes was True and is False"):
        require_same(wanted.identity(1), replace(wanted, share_prefixes=False).identity(1), where=tmp_path)


def test_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for balance in ("queue", "micro", "global", "local"):
        with pytest.raises(ValueError, match=f"--share-prefixes goes with --balance mini; it is {balance}"):
            options(folder, balance=balance)
    make_new_positions(monkeypatch)
    config_of("StableLm").save_pretrained(tmp_path)
    wanted = options(folder, init=str(tmp_path / "config.json"))
    how = {"longest": 16, "largest_token": 9, "rank": 1}
    build_model(replace(wanted, share_prefixes=False), None, **how)
    with pytest.raises(PackingUnsupported, match="--share-prefixes: StableLmForCausalLM does not pass on"):
        build_model(wanted, None, **how)
