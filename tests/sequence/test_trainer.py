"""ODCTrainer(split=True): the same training as on unsplit samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from odc_triton import enable_split, full_parameters, fully_shard
from odc_triton.balance import MinibatchSampler
from odc_triton.hf import ODCTrainer
from tests.support import ranks, slow
from tests.support.parity import whole_model_error
from tests.support.splitting import Setup, build, samples, sharded

SETUP, REPLICAS = Setup(), Setup(deal="2x2", replicas=2)


def _train(
    rank: int, world: int, folder: str, setup: Setup, split: bool
) -> tuple[dict[str, torch.Tensor], list[float], int]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    options = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    options |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 1)
    arguments = TrainingArguments(folder, max_steps=4, learning_rate=1e-3, **options)
    model = sharded(setup, rank)
    data = [{name: value.tolist() for name, value in each.items()} for each in samples(setup)]
    trainer = ODCTrainer(model, arguments, train_dataset=data, eval_dataset=data, split=split)
    assert "forward" in vars(model.model.layers[0].mlp), "in chunks"
    trainer.train()
    waits = [event for event in model._odc_engine.events.drain() if "in layer" in event.label]
    segments = sum(packs.split is not None for packs in trainer._sampler)
    assert any(packs.split is not None for packs in trainer.get_eval_dataloader()) == split
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    losses.append(trainer.evaluate()["eval_loss"])
    assert split or not waits
    return {name: value.clone() for name, value in full_parameters(model)}, losses, segments


@pytest.mark.parametrize(("setup", "world"), [(SETUP, 2), slow(REPLICAS, 4)], ids=["one replica", "two replicas"])
def test_as_on_whole_samples(tmp_path: Path, setup: Setup, world: int) -> None:
    outcomes = ranks.run_all(world, *((_train, str(tmp_path), setup, split) for split in (True, False)))
    for (weights, losses, segments), (want, want_losses, none) in zip(*outcomes, strict=True):
        assert (segments > 0, none) == (True, 0)
        assert losses == pytest.approx(want_losses, rel=1e-5)
        assert whole_model_error(weights, want) <= 1e-5  # fp32 sums in another order


def test_what_is_missing_is_said() -> None:
    model: Any = fully_shard(build(SETUP, replaced=False))
    with pytest.raises(ValueError, match=r"split=True: call odc_triton.enable_split\(model, tokens=…\) after"):
        ODCTrainer(model, split=True)
    enable_split(model, tokens=20)
    with pytest.raises(ValueError, match=r"give MinibatchSampler\(…, split=True\) instead"):
        ODCTrainer(model, split=True, sampler=MinibatchSampler([5], 1, 5))
