"""Usual arguments of transformers' Trainer: ODCTrainer on one rank against plain transformers on whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_case import assert_weights_alike, logs, odc_trainer, plain_trainer, weights_of


def _compare(tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    """Trains both; their losses, norms and weights are alike."""
    ours, plain = odc_trainer(str(tmp_path / "odc"), 1, **changes), plain_trainer(str(tmp_path / "plain"), **changes)
    ours.train()
    plain.train()
    # The order of fp32 sums differs: packs against samples.
    for key in ("loss", "grad_norm", "learning_rate"):
        torch.testing.assert_close(logs(ours, key), logs(plain, key), rtol=1e-4, atol=0)
    assert len(logs(ours, "loss")) == len(logs(plain, "loss")) > 0
    assert_weights_alike(weights_of(ours.model), dict(plain.model.named_parameters()))
    return ours, plain


def test_noise_of_the_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NEFTune's is scaled by each sample's length; here each random number is the same part of its range."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, a, b, **_: self.fill_(0.25 * a + 0.75 * b))
    ours, _ = _compare(tmp_path, neftune_noise_alpha=5.0)
    assert not ours.model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_as_plain(tmp_path: Path, changes: dict[str, Any]) -> None:
    _compare(tmp_path, **changes)
