"""What optimizers and callbacks write between steps is what trainers evaluate, save and sample by, on all ranks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from tests.support import ranks, slow, trl_case
from tests.support.trainer_case import logs, odc_trainer, pad, samples, weights_of

UNIFORM = math.log(97)  # the loss of weights that are all 0
LATE_S = 0.1  # of one owner; others would read in between


class TwoModes(torch.optim.SGD):
    """As schedule-free optimizers: evaluation is by other weights, here zeros; the last rank is slow to write."""

    def __init__(self, model: nn.Module, is_late: bool) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self._late_s, self._kept = LATE_S * is_late, None

    @torch.no_grad()
    def eval(self) -> None:
        if self._kept is None:
            time.sleep(self._late_s)
            self._kept = [p.to_local().clone() for p in self.param_groups[0]["params"]]
            for p in self.param_groups[0]["params"]:
                p.to_local().zero_()

    @torch.no_grad()
    def train(self) -> None:
        if self._kept is not None:
            time.sleep(self._late_s)
            for p, value in zip(self.param_groups[0]["params"], self._kept, strict=True):
                p.to_local().copy_(value)
            self._kept = None


class Zeros(TrainerCallback):
    """As a swap of averaged weights at the end."""

    def __init__(self, is_late: bool) -> None:
        self._late_s = LATE_S * is_late

    def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        time.sleep(self._late_s)
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().zero_()


def _trained(rank: int, world: int, folder: str, bf16: bool) -> dict[str, Any]:
    is_late = rank == world - 1
    changes = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "bf16_shards": bf16}
    given = {"eval_dataset": samples()[:4], "data_collator": pad, "compute_metrics": lambda predicted: {}}
    trainer = odc_trainer(folder, world, **changes, **given)
    trainer.optimizer = TwoModes(trainer.model, is_late)
    trainer.train()  # padded evaluation
    trainer.compute_metrics = None
    found = {"loss": logs(trainer, "loss"), "eval": [*logs(trainer, "eval_loss"), trainer.evaluate()["eval_loss"]]}

    plain = odc_trainer(f"{folder}/plain", world, max_steps=2, bf16_shards=bf16, callbacks=[Zeros(is_late)], **given)
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=1e-2)
    plain.train()
    plain.save_model(f"{folder}/saved")
    saved = load_file(f"{folder}/saved/model.safetensors")
    return found | {
        "plain": logs(plain, "loss"),
        "largest": max(float(value.abs().max()) for value in saved.values()),
        "predicted": float(abs(plain.predict(samples()[:4]).predictions).max()),
    }


@pytest.mark.parametrize("bf16", [True, slow(False)])
def test_evaluated_and_saved(tmp_path: Path, bf16: bool) -> None:
    for found in ranks.run(_trained, 2, str(tmp_path), bf16):
        assert found["eval"] == pytest.approx([UNIFORM] * 3, rel=1e-3)  # logits of bf16
        assert found["loss"] == pytest.approx(found["plain"], rel=1e-5)  # steps are taken from the kept weights
        assert (found["largest"], found["predicted"]) == (0.0, 0.0)


def _sampled(rank: int, world: int, folder: str) -> list[tuple[bool, set[bool]]]:
    trainer = trl_case.odc_trainer(folder, world, eval_strategy="steps", eval_steps=1, max_steps=2)
    trainer.optimizer = TwoModes(trainer.model, rank == world - 1)
    sample, found = trainer._generate_single_turn, []

    def reads(*args: Any) -> Any:
        weights = [value for value in weights_of(trainer.model).values() if value.ndim > 1]
        rows = {bool(row.any()) for value in weights for row in (value[1], value[-1])}  # of both owners
        found.append((trainer.model.training, rows))
        return sample(*args)

    trainer._generate_single_turn = reads
    trainer.train()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL uses attributes that transformers has renamed
def test_sampled(tmp_path: Path) -> None:
    """Completions are sampled by all owners' weights of training, or all owners' zeros in evaluation."""
    for found in ranks.run(_sampled, 2, str(tmp_path)):
        assert {mode for mode, _ in found} == {True, False}
        assert all(rows == {mode} for mode, rows in found), found
