"""ODCTrainer's numbers are of what an override computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from odc_triton.hf import ODCTrainer
from tests.support.trainer_case import arguments, logs, samples, sharded_model


def _trained(kind: type, folder: Path) -> Any:
    """Its trainer after one step."""
    trainer = kind(sharded_model(), arguments(str(folder), max_steps=1), train_dataset=samples())
    trainer.train()
    return trainer


def test_a_step_on_fewer_packs(tmp_path: Path) -> None:
    """The mean is over the targets of those."""

    class First(ODCTrainer):
        def training_step(self, model: Any, inputs: Any, *given: Any) -> Any:
            del inputs[1:]
            (self.pack,) = inputs
            return super().training_step(model, inputs, *given)

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> torch.Tensor:
            self.losses = super().compute_loss(model, inputs, *given, num_items_in_batch=1)
            return self.losses / named["num_items_in_batch"]

    trainer = _trained(First, tmp_path)
    count = len(trainer.pack["target_positions"])
    assert logs(trainer, "target_tokens") == [count]
    assert logs(trainer, "loss") == pytest.approx([trainer.losses.item() / count])


def test_inputs_may_be_taken_out(tmp_path: Path) -> None:
    class Pops(ODCTrainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> torch.Tensor:
            loss = super().compute_loss(model, inputs, *given, **named)
            inputs.pop("input_ids")
            return loss

    popped, plain = (_trained(kind, tmp_path) for kind in (Pops, ODCTrainer))
    for name in ("loss", "target_tokens"):
        assert logs(popped, name) == logs(plain, name)


def test_a_loss_of_two_calls(tmp_path: Path) -> None:
    """TRL's metrics are of the tokens of both."""

    class Halves(ODCTrainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> torch.Tensor:
            at = inputs["target_positions"]
            halves = ({**inputs, "target_positions": part} for part in at.tensor_split(2))
            loss = sum(super(Halves, self).compute_loss(model, half, *given, **named) for half in halves)
            self.seen = loss.item() * named["num_items_in_batch"], self._pack_sums["token_loss"].item()
            return loss

    trainer = _trained(Halves, tmp_path)
    assert logs(trainer, "loss") == pytest.approx(logs(_trained(ODCTrainer, tmp_path), "loss"))
    assert trainer.seen[1] == pytest.approx(trainer.seen[0]), "of the last pack"
