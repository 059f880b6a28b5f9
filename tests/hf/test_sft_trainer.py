"""ODCSFTTrainer, against SFTTrainer alone on one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, slow
from tests.support.models import build
from tests.support.trainer_case import assert_weights_alike, samples
from tests.support.trl_case import sft_run

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")


def _train(rank: int, world: int, folder: str, changes: dict[str, Any], ours: bool = True) -> dict[str, Any]:
    # TRL's metrics of an evaluation are means of batches.
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 12}
    model = build("mixtral" if "router_aux_loss_coef" in changes else "qwen2")
    return sft_run(ours, world, folder, model, evaluated | changes, eval_dataset=samples())


@pytest.mark.parametrize("changes", [{}, slow({"loss_type": "dft"})], ids=str)
def test_as_trl(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Losses, metrics and weights."""
    results = ranks.run(_train, 2, str(tmp_path / "odc"), changes)
    (plain,) = ranks.run(_train, 1, str(tmp_path / "plain"), changes, False)
    skipped = ("runtime", "per_second", "epoch", "total_flos")  # TRL's data are those of all epochs, padded
    for result in results:
        for got, want in zip(result["logs"], plain["logs"], strict=True):
            for name, value in want.items():
                if not name.endswith(skipped):  # the order of sums differs
                    assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= plain["logs"][0].keys()
    assert any(entry.get("mean_token_accuracy") for entry in plain["logs"])
    assert_weights_alike(results[0]["weights"], plain["weights"])


@pytest.mark.slow
def test_a_routers_loss_as_trl(tmp_path: Path) -> None:
    """On microbatches of one sample, by SFTConfig's coefficient. An evaluation leaves it out."""
    changes = {"router_aux_loss_coef": 0.5, "eval_strategy": "no"}
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    ours = ranks.run(_train, 2, str(tmp_path / "odc"), changes)
    (plain,) = ranks.run(_train, 1, str(tmp_path / "plain"), changes | alone, False)
    for result in ours:
        for got, want in zip(result["logs"][:3], plain["logs"], strict=False):
            for name in ("loss", "aux_loss", "grad_norm", "num_tokens"):
                assert got[name] == pytest.approx(want[name], rel=1e-4), name
    assert_weights_alike(ours[0]["weights"], plain["weights"])
