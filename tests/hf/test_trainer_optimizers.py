"""ODCTrainer with the optimizers that transformers' Trainer knows by name, against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import ranks
from tests.support.models import build
from tests.support.trainer_case import LENGTHS, arguments, sample_loss, samples, sharded_model, weights_of

STEPS = 3
NAMES = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")


def _changes(name: str) -> dict:
    return {"optim": name, "max_steps": STEPS, "warmup_steps": 0, "lr_scheduler_type": "constant"}


def _sharded_weights(rank: int, world: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    from odc_triton.hf import ODCTrainer

    found = {}
    for name in NAMES:
        args = arguments(folder, per_device_train_batch_size=4 // world, **_changes(name))
        trainer = ODCTrainer(sharded_model(), args, train_dataset=samples())
        trainer.train()
        found[name] = weights_of(trainer.model)
    return found


def _plain_weights(name: str, folder: str) -> dict[str, torch.Tensor]:
    """The same steps on whole tensors, by the class and the options that Trainer itself chooses."""
    from transformers import Trainer

    from odc_triton.balance import MinibatchSampler

    data, model = samples(), build("qwen2").train()
    kind, how = Trainer.get_optimizer_cls_and_kwargs(arguments(folder, **_changes(name)), model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **how)
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS), seed=42, rank=0, world=1)
    for packs in [packs for _ in range(STEPS) for packs in sampler][:STEPS]:
        chosen = [data[index] for pack in packs for index in pack]
        tokens = sum(label != -100 for sample in chosen for label in sample["labels"][1:])
        (sum(sample_loss(model, sample) for sample in chosen) / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    return ranks.run(_sharded_weights, 2, str(tmp_path_factory.mktemp("trainer")))[0]


@pytest.mark.parametrize("name", NAMES)
def test_as_plain_torch(sharded: dict[str, dict[str, torch.Tensor]], name: str, tmp_path: Path) -> None:
    plain, start = _plain_weights(name, str(tmp_path)), dict(build("qwen2").named_parameters())
    for parameter, want in plain.items():
        # By the norm of the whole change: sums of gradients are made in another order, and optimizers that divide by
        # a gradient's size turn one that is all rounding into a step.
        change = (want - start[parameter]).norm()
        error = (sharded[name][parameter] - want).norm() / change
        assert change > 0, parameter
        assert error < 1e-3, f"{parameter}: {error}"
