"""The recipes of docs/recipes.md train mixed samples as one process does, with images on some ranks only."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks, titan_case
from tests.support.vision import FAMILIES, alone

FAMILY = FAMILIES["qwen2_5_vl"]
EXAMPLES = Path(__file__).parent.parent / "examples"
_SIZES = [(9, 2), (5, 0), (12, 1), (7, 0)]  # of one step's samples: tokens of text, images
_STEPS = ([[0, 1, 2], [3]], [[2], [1, 3]], [[], [0]])  # by step, each rank's samples
_RATE = 0.1


def _plain() -> nn.Module:
    """What one process makes of all ranks' samples, by plain transformers."""
    model, samples = FAMILY.model(dtype=torch.float64), FAMILY.samples(_SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for ranks_samples in _STEPS:
        summed, tokens = torch.zeros((), dtype=torch.float64), 0
        for at in (each for mine in ranks_samples for each in mine):
            labels = torch.tensor(samples[at]["labels"][1:])
            logits = alone(model, samples[at])[:-1].float()  # as summed_loss takes them
            summed = summed + nn.functional.cross_entropy(logits, labels, reduction="sum")
            tokens += int((labels != -100).sum())
        (summed / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _accelerate(rank: int, world: int) -> dict[str, torch.Tensor]:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    from odc_triton import full_parameters

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}  # which it only looks at
    # accelerate uses its plugin on GPUs only: a CPU's ranks pass for GPUs'.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    model, samples = FAMILY.model(dtype=torch.float64), FAMILY.samples(_SIZES)
    train = runpy.run_path(str(EXAMPLES / "recipe_accelerate.py"))["train"]
    steps = [[samples[at] for at in each[rank]] for each in _STEPS]
    model = train(model, torch.optim.SGD(model.parameters(), lr=_RATE), steps)
    return {name: value.clone() for name, value in full_parameters(model)}


def test_accelerate() -> None:
    trained: list[dict[str, Any]] = ranks.run(_accelerate, 2)
    for name, value in _plain().named_parameters():
        for each in trained:
            torch.testing.assert_close(each[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


# ------------------------------------------------------------------ torchtitan


class _Counting:
    """torchtitan's own trainer, where one process has the microbatches of all ranks."""

    def train_step(self, data_iterator: Any) -> None:
        self.gradient_accumulation_steps = self.dataloader.microbatches(self.step)
        super().train_step(data_iterator)


def _torchtitan(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    titan_case.as_cpu()
    os.chdir(folder)  # it writes logs
    if world == 1:
        from torchtitan.trainer import Trainer

        trainer = type("Plain", (_Counting, Trainer), {})(titan_case.config_of((0, 1)))
    else:
        recipe = runpy.run_path(str(EXAMPLES / "recipe_torchtitan.py"))["TrainerByOdc"]
        trainer = recipe(titan_case.config_of((rank,)))
    return titan_case.train(trainer)


@pytest.mark.slow
@pytest.mark.skipif(not titan_case.FOLDER.exists(), reason="torchtitan is installed by `make test-slow`")
def test_torchtitan(tmp_path: Path) -> None:
    (plain,) = ranks.run(_torchtitan, 1, str(tmp_path))
    trained = ranks.run(_torchtitan, 2, str(tmp_path))
    assert len(plain) == 17
    for name, value in plain.items():
        for each in trained:
            # fp32, summed in another order
            torch.testing.assert_close(each[name], value, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
