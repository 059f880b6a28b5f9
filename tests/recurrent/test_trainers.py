"""TRL's trainers on hybrids: ours on two ranks against TRL's own on whole models, also with shared prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import pair_case, ranks, trl_case
from tests.support.hybrids import hybrid
from tests.support.trl_case import assert_alike

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])]


def folder_of(name: str, path: Path) -> str:
    hybrid(name, dtype=torch.float32).save_pretrained(path / "model")
    return str(path / "model")


def pairs(rank: int, world: int, ours: bool, folder: str, start: str) -> dict[str, Any]:
    return pair_case.run("DPO", ours, world, folder, start, {"learning_rate": 0.5})


def test_dpo_as_trl(name: str, tmp_path: Path) -> None:
    start = folder_of(name, tmp_path)
    (plain,) = ranks.run(pairs, 1, False, str(tmp_path / "trl"), start)
    ours = ranks.run(pairs, 2, True, str(tmp_path / "odc"), start)
    assert_alike(ours, plain, tolerance=5e-5)
    assert sum(each["computed"] for each in ours) < 0.75 * plain["computed"], "prompts of a pair are computed once"


@pytest.mark.parametrize("share", ["auto", "off"])
def test_grpo_as_trl(name: str, share: str, tmp_path: Path) -> None:
    start, changes = folder_of(name, tmp_path), {"loss_type": "dapo", "num_iterations": 2, "beta": 0.1}
    (plain,) = ranks.run(trl_case.plain_run, 1, str(tmp_path / "trl"), start, changes)
    ours = ranks.run(trl_case.odc_run, 2, str(tmp_path / "odc"), start, changes | {"share_prefixes": share})
    assert_alike(ours, plain, tolerance=5e-5)
