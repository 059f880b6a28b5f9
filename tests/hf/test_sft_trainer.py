"""ODCSFTTrainer, against SFTTrainer alone on one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch import nn

from odc_triton import fully_shard
from odc_triton.hf import ODCSFTTrainer, enable_packing
from tests.support import ranks, slow
from tests.support.models import build
from tests.support.trainer_case import assert_weights_alike, in_order, samples, weights_of
from tests.support.trl_case import COMMON, environment, tokenizer

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")


def _arguments(folder: str, changes: dict[str, Any]) -> Any:
    from trl import SFTConfig

    wanted = COMMON | {
        "output_dir": folder,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 12,  # TRL's metrics of an evaluation are means of batches
    }
    return SFTConfig(**wanted | changes)


def _train(rank: int, world: int, folder: str, changes: dict[str, Any], plain: bool = False) -> dict[str, Any]:
    from trl import SFTTrainer

    environment()
    order = {"train_sampling_strategy": "sequential"} if plain else {}
    args = _arguments(folder, {"per_device_train_batch_size": 4 // world} | order | changes)
    data = Dataset.from_list(in_order() if plain else samples())
    given = {"eval_dataset": Dataset.from_list(samples()), "processing_class": tokenizer()}
    model: nn.Module = build("mixtral" if "router_aux_loss_coef" in changes else "qwen2")
    if not plain:
        enable_packing(model)
        model = fully_shard(model)
    trainer = (SFTTrainer if plain else ODCSFTTrainer)(model, args, train_dataset=data, **given)
    trainer.train()
    weights = dict(model.named_parameters()) if plain else weights_of(model) if rank == 0 else {}
    return {"logs": trainer.state.log_history, "weights": {name: value.detach() for name, value in weights.items()}}


@pytest.mark.parametrize("changes", [{}, slow({"loss_type": "dft"})], ids=str)
def test_as_trl(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Losses, metrics and weights."""
    results = ranks.run(_train, 2, str(tmp_path / "odc"), changes)
    (plain,) = ranks.run(_train, 1, str(tmp_path / "plain"), changes, True)
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
    (plain,) = ranks.run(_train, 1, str(tmp_path / "plain"), changes | alone, True)
    for result in ours:
        for got, want in zip(result["logs"][:3], plain["logs"], strict=False):
            for name in ("loss", "aux_loss", "grad_norm", "num_tokens"):
                assert got[name] == pytest.approx(want[name], rel=1e-4), name
    assert_weights_alike(ours[0]["weights"], plain["weights"])
