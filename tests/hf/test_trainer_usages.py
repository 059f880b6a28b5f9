"""Usual arguments of transformers' Trainer: ODCTrainer on one rank against plain transformers on whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from odc_triton import fully_shard, minibatch
from odc_triton.hf import ODCTrainer, enable_packing, summed_loss
from odc_triton.packs.collate import count_target_tokens, pack_collate
from tests.support.models import build
from tests.support.trainer_case import (
    LENGTHS,
    arguments,
    assert_weights_alike,
    logs,
    odc_trainer,
    pad,
    plain_trainer,
    sample_loss,
    samples,
    sharded_model,
    weights_of,
)
from tests.support.versions import is_older


def _compare(
    tmp_path: Path, plainly: dict[str, Any] | None = None, tolerance: float = 1e-4, **changes: Any
) -> tuple[Any, Any]:
    """Trains both; their losses, norms and weights are alike. `plainly`: what plain Trainer has instead."""
    ours = odc_trainer(str(tmp_path / "odc"), 1, **changes)
    plain = plain_trainer(str(tmp_path / "plain"), **(changes if plainly is None else plainly))
    ours.train()
    plain.train()
    # The order of fp32 sums differs: packs against samples.
    for key in ("loss", "grad_norm", "learning_rate"):
        torch.testing.assert_close(logs(ours, key), logs(plain, key), rtol=tolerance, atol=0)
    assert len(logs(ours, "loss")) == len(logs(plain, "loss")) > 0
    assert_weights_alike(weights_of(ours.model), dict(plain.model.named_parameters()), tolerance)
    return ours, plain


def test_noise_of_the_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NEFTune's is scaled by each sample's length; here each random number is the same part of its range."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, a, b, **_: self.fill_(0.25 * a + 0.75 * b))
    ours, _ = _compare(tmp_path, neftune_noise_alpha=5.0)
    assert not ours.model.get_input_embeddings()._forward_hooks


def test_as_plain(tmp_path: Path) -> None:
    """A step of two batches of two samples is one of four."""
    smoothing = 0.0 if is_older("5.15") else 0.1  # before, plain Trainer adds up means of microbatches
    changes = {"label_smoothing_factor": smoothing, "max_grad_norm": 0.0}
    changes |= {"include_num_input_tokens_seen": "non_padding"}
    # Plain Trainer's loss of an evaluation is a mean of batches.
    evaluated = {"eval_dataset": samples(), "per_device_eval_batch_size": 12, "eval_strategy": "steps", "eval_steps": 2}
    plainly = changes | evaluated | {"eval_on_start": True}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    ours, plain = _compare(tmp_path, plainly, **plainly, **batches)
    assert ours.state.max_steps == plain.state.max_steps
    assert ours.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
    assert len(logs(ours, "eval_loss")) > 1
    torch.testing.assert_close(logs(ours, "eval_loss"), logs(plain, "eval_loss"), rtol=1e-4, atol=0)


def test_other_data_in_a_second_run(tmp_path: Path) -> None:
    """As many samples, which are longer, then fewer."""
    trainer = odc_trainer(str(tmp_path), 1, max_steps=1)
    for data in (samples(), [{"input_ids": [5] * 40}] * len(LENGTHS), samples()[:5]):
        trainer.train_dataset = data
        trainer.train()
        assert trainer._sampler.lengths == [len(each["input_ids"]) for each in data]


def test_bf16(tmp_path: Path) -> None:
    """bf16=True, TRL's default: products are bf16's and masters fp32's."""
    seen = set()

    def see(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen.add(output.dtype)

    ours = odc_trainer(str(tmp_path / "odc"), 1, bf16=True, use_cpu=True)
    ours.model.model.layers[0].mlp.down_proj.register_forward_hook(see)
    plain = plain_trainer(str(tmp_path / "plain"), bf16=True)
    ours.train()
    plain.train()
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.float32}
    # bf16 has 8 bits, and other packs round otherwise.
    torch.testing.assert_close(logs(ours, "loss"), logs(plain, "loss"), rtol=1e-3, atol=0)
    torch.testing.assert_close(logs(ours, "grad_norm"), logs(plain, "grad_norm"), rtol=3e-2, atol=0)


def test_accelerate_divides_nothing() -> None:
    """By gradient_accumulation_steps: a minibatch's losses are divided by all its tokens already."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model, plain = sharded_model(), build("qwen2")
        packs = pack_collate([[sample] for sample in samples()[:2]])
        with minibatch(model, tokens=count_target_tokens(packs)) as mb:
            for pack in packs:
                accelerator.backward(summed_loss(model, pack) / mb.tokens)
        assert accelerator.gradient_accumulation_steps == 2
        (sum(sample_loss(plain, sample) for sample in samples()[:2]) / mb.tokens).backward()
        for name, parameter in plain.named_parameters():
            found = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)  # sums in another order
    finally:
        accelerator.gradient_accumulation_steps = 1  # of all of the process's accelerators


def test_a_padded_evaluation_of_a_mixture_is_of_its_logits(tmp_path: Path) -> None:
    """Not of its routers' logits too."""
    model = build("mixtral")
    model.config.output_router_logits = True
    enable_packing(model)
    shapes = []
    ODCTrainer(
        fully_shard(model),
        arguments(str(tmp_path), per_device_eval_batch_size=3, dataloader_pin_memory=False),
        eval_dataset=samples()[:7],
        data_collator=pad,
        compute_metrics=lambda seen: shapes.append(seen.predictions.shape) or {},
    ).evaluate()
    assert [(rows, words) for rows, _, words in shapes] == [(7, 97)]
