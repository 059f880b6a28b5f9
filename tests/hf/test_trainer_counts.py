"""What ODCTrainer's numbers are of: all samples of an evaluation; what an override computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_case import LENGTHS, arguments, logs, samples, sharded_model


def _entries(kind: type, folder: Path, **changes: Any) -> list[dict[str, float]]:
    args = arguments(str(folder), max_steps=1, per_device_train_batch_size=4, **changes)
    trainer = kind(sharded_model(), args, train_dataset=samples())
    trainer.train()
    return [{name: logs(trainer, name)[0] for name in ("loss", "target_tokens")}]


def test_an_evaluation_has_all_samples(tmp_path: Path) -> None:
    """Also where the last ones don't fill a minibatch, which training leaves out."""
    from odc_triton.hf import ODCTrainer

    args = arguments(str(tmp_path), dataloader_drop_last=True, per_device_eval_batch_size=5)
    trainer = ODCTrainer(sharded_model(), args, train_dataset=samples(), eval_dataset=samples())
    loader = trainer.get_eval_dataloader()
    assert sum(pack["input_ids"].numel() for packs in loader for pack in packs) == sum(LENGTHS)


def test_a_step_on_fewer_packs(tmp_path: Path) -> None:
    """The mean is over the targets of those."""
    from odc_triton.hf import ODCTrainer

    class First(ODCTrainer):
        def training_step(self, model: Any, inputs: Any, *given: Any) -> Any:
            del inputs[1:]
            (self.pack,) = inputs
            return super().training_step(model, inputs, *given)

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> torch.Tensor:
            self.losses = super().compute_loss(model, inputs, *given, num_items_in_batch=1)
            return self.losses / named["num_items_in_batch"]

    args = arguments(str(tmp_path), max_steps=1)
    trainer = First(sharded_model(), args, train_dataset=samples())
    trainer.train()
    count = len(trainer.pack["target_positions"])
    assert logs(trainer, "target_tokens") == [count]
    assert logs(trainer, "loss") == pytest.approx([trainer.losses.item() / count])


def test_inputs_may_be_taken_out(tmp_path: Path) -> None:
    from odc_triton.hf import ODCTrainer

    class Pops(ODCTrainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> torch.Tensor:
            loss = super().compute_loss(model, inputs, *given, **named)
            inputs.pop("input_ids")
            return loss

    assert _entries(Pops, tmp_path) == _entries(ODCTrainer, tmp_path)


def test_a_loss_of_two_calls(tmp_path: Path) -> None:
    """TRL's metrics are of the tokens of both."""
    from odc_triton.hf import ODCTrainer

    class Halves(ODCTrainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> torch.Tensor:
            at = inputs["target_positions"]
            halves = ({**inputs, "target_positions": part} for part in at.tensor_split(2))
            loss = sum(super(Halves, self).compute_loss(model, half, *given, **named) for half in halves)
            self.sums = self._pack_sums
            return loss

    args = arguments(str(tmp_path), max_steps=1)
    trainer = Halves(sharded_model(), args, train_dataset=samples())
    trainer.train()
    assert logs(trainer, "loss") == pytest.approx([each["loss"] for each in _entries(ODCTrainer, tmp_path)])
    assert trainer.sums["token_loss"].item() > 0
