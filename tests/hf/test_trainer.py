"""ODCTrainer on real ranks, against transformers' own Trainer on whole models; checkpoints, evaluation."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from odc_triton.balance import MinibatchSampler
from odc_triton.checkpoint.dcp import read_metadata, tensors_of
from tests.support import ranks
from tests.support.models import build
from tests.support.trainer_case import (
    LENGTHS,
    LR,
    STEPS,
    arguments,
    logs,
    odc_trainer,
    pad,
    plain_trainer,
    sample_loss,
    samples,
    steps_in_order,
    targets,
    weights_of,
)
from tests.support.trl_case import tokenizer

LOGGED = ("loss", "grad_norm", "target_tokens", "learning_rate")
OLD = "model-00001-of-00002.safetensors"
OPTIMIZERS = ("adamw_torch_fused", "sgd", "rmsprop", "adagrad", "adamw_bnb_8bit")

# ------------------------------------------------------------------ the same training


def _train(rank: int, world: int, folder: str, resume: str | bool | None = None, **changes: Any) -> dict[str, Any]:
    trainer = odc_trainer(folder, world, **changes)
    trainer.train(resume_from_checkpoint=resume)
    final = Path(folder, "final")
    if rank == 0:  # what another run has left there
        (final / "additional_chat_templates").mkdir(parents=True, exist_ok=True)
        (final / OLD).touch()
    trainer.processing_class = tokenizer()
    trainer.processing_class.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    for _ in range(2):
        trainer.save_model(str(final))
    left = {file.name for file in final.glob("*model*.safetensors*")}
    assert left == ({"adapter_model.safetensors", OLD} if "lora" in changes else {"model.safetensors"})
    return _summary(trainer, rank)


def _summary(trainer: Any, rank: int) -> dict[str, Any]:
    # One rank alone: reads are one-sided.
    return {key: logs(trainer, key) for key in LOGGED} | {"weights": weights_of(trainer.model) if rank == 0 else None}


def _assert_as_plain(results: list[dict[str, Any]], folder: Path, **changes: Any) -> None:
    plain = plain_trainer(str(folder / "plain"), **changes)
    plain.train()
    tokens = [targets(step) for step in steps_in_order(changes.get("count", 4))]
    for result in results:
        assert result["target_tokens"] == tokens
        # The order of fp32 sums differs: packs against samples, and over ranks. Trainer rounds neither loss nor norm.
        torch.testing.assert_close(result["loss"], logs(plain, "loss"), rtol=1e-5, atol=0)
        torch.testing.assert_close(result["grad_norm"], logs(plain, "grad_norm"), rtol=1e-4, atol=0)
    for name, want in plain.model.named_parameters():
        # By norm: Adam turns a gradient that is all rounding into steps of up to the learning rate. That of a bias
        # of keys is nearly so, as softmax takes out what all keys share: hence a thousandth of a step besides.
        floor = 1e-3 * LR if name.endswith("k_proj.bias") else 0.0
        error = (results[0]["weights"][name] - want).norm()
        assert error <= 1e-4 * want.norm() + floor, f"{name}: {error}"


def _train_one_sample_a_step(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A rank has one pack or none."""
    sampler = MinibatchSampler(LENGTHS, 1, max(LENGTHS), seed=42, rank=rank, world=world)
    sampler.samples_per_minibatch = 1
    trainer = odc_trainer(folder, 1, sampler=sampler)
    trainer.model._odc_engine.events.drain()
    trainer.train()
    seen = trainer.model._odc_engine.events.drain()
    return _summary(trainer, rank) | {
        "barriers": [e.label for e in seen if e.kind == "wait" and "minibatch" in e.label],
        "forwards": sorted({e.minibatch for e in seen if e.kind == "forward"}),
    }


def _by_optimizer(rank: int, world: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in OPTIMIZERS:
        trainer = odc_trainer(folder, world, **_changes(name))
        trainer.train()
        found[name] = weights_of(trainer.model)
    return found


def _changes(optimizer: str) -> dict[str, Any]:
    return {"optim": optimizer, "max_steps": 3, "warmup_steps": 0, "lr_scheduler_type": "constant"}


def _each(rank: int, world: int, folder: str) -> tuple:
    return _train_one_sample_a_step(rank, world, folder), _by_optimizer(rank, world, folder)


def test_ranks_without_packs_and_other_optimizers(tmp_path: Path) -> None:
    found = ranks.run(_each, 2, str(tmp_path))
    results = [result for result, _ in found]
    _assert_as_plain(results, tmp_path, count=1)
    assert sorted(result["forwards"] for result in results) == [[], list(range(STEPS))]
    for result in results:
        steps = ("enter", "leave", "sum up")
        assert result["barriers"] == [f"{what} minibatch {i}" for i in range(STEPS) for what in steps]
    start = dict(build("qwen2").named_parameters())
    for name, weights in found[0][1].items():
        plain = plain_trainer(str(tmp_path / name), **_changes(name))
        plain.train()
        for parameter, want in plain.model.named_parameters():
            # By the norm of the whole change: sums of gradients are made in another order, and optimizers that divide
            # by a gradient's size turn one that is all rounding into a step.
            change = (want - start[parameter]).norm()
            assert change > 0, f"{name}: {parameter}"
            assert (weights[parameter] - want).norm() < 1e-3 * change, f"{name}: {parameter}"


# ------------------------------------------------------------------ checkpoints

SAVING = {"exact": True, "full_determinism": True, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 4}


def _stopped(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """A whole run, one that goes on in the middle of its first epoch, and what is refused."""
    whole = _train(rank, world, f"{folder}/whole", **SAVING)
    resumed = _train(rank, world, f"{folder}/resumed", f"{folder}/whole/checkpoint-2", seed=9, **SAVING)
    changes = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True, "max_steps": 1}
    _train(rank, world, f"{folder}/model", **changes)
    with pytest.raises(ValueError, match="has no complete odc/ folder"):
        _train(rank, world, f"{folder}/none", f"{folder}/model/checkpoint-1")
    with pytest.raises(Exception, match="samples_per_minibatch 4, here it is 8"):
        odc_trainer(f"{folder}/larger", 1).train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
    return [whole, resumed]


def test_as_plain_and_goes_on(tmp_path: Path) -> None:
    """A run that goes on ends with the same bits, as sums are exact; on fewer ranks, from the end of an epoch, packs
    differ. What is saved is for plain transformers.
    """
    found = ranks.run(_stopped, 2, str(tmp_path))
    _assert_as_plain([whole for whole, _ in found], tmp_path)
    assert sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))[0] == "checkpoint-2"
    (whole, resumed), (other, resumed_other) = found
    for name, weight in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name
    for key in LOGGED:
        assert resumed[key] == resumed_other[key] == whole[key] == other[key]  # the log's history is the checkpoint's
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    (fewer,) = ranks.run(partial(_train, seed=9), 1, str(tmp_path / "fewer"), checkpoint)
    for key in LOGGED:
        torch.testing.assert_close(fewer[key], whole[key], rtol=1e-5, atol=0)  # sums come in another order

    _assert_loads(tmp_path / "whole" / "final", whole["weights"])
    _assert_loads(tmp_path / "whole" / f"checkpoint-{STEPS}", whole["weights"])
    assert not (tmp_path / "model" / "checkpoint-1" / "odc").exists()
    assert (tmp_path / "model" / "checkpoint-1" / "model.safetensors").exists()


def _assert_loads(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """In plain transformers: the same weights, identical logits."""
    ids, want = torch.tensor([[5, 9, 3, 17, 40, 2]]), build("qwen2").eval()
    want.load_state_dict(weights)
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(loaded(ids).logits, want(ids).logits)
    assert (folder / "training_args.bin").exists()


def _adapted(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    whole = _train(rank, world, f"{folder}/whole", lora=True, save_strategy="steps", save_steps=2)
    return [whole, _train(rank, world, f"{folder}/resumed", f"{folder}/whole/checkpoint-2", seed=9, lora=True)]


# PEFT asks transformers by a name that is going away.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters(tmp_path: Path) -> None:
    """PEFT's model trains as in plain torch; its checkpoints and its folder have the adapters only."""
    import peft

    found = ranks.run(_adapted, 2, str(tmp_path))
    _assert_as_plain([whole for whole, _ in found], tmp_path, lora=True)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    names = tensors_of(read_metadata(checkpoint / "odc"))
    assert sum(name.startswith("model.") for name in names) == 8  # A and B of two projections in two layers
    assert json.loads((checkpoint / "odc" / "base.json").read_text())["name"] == "the/base"
    final, (whole, resumed) = tmp_path / "whole" / "final", found[0]
    for folder in (checkpoint, final):
        files = {path.name for path in folder.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        assert "model.safetensors" not in files
    for name, value in peft.PeftModel.from_pretrained(build("qwen2"), final).named_parameters():
        assert torch.equal(value, whole["weights"][name]), name
    # The same masters and moments; sums over ranks come in another order.
    torch.testing.assert_close(resumed["loss"][2:], whole["loss"][2:], rtol=1e-5, atol=0)


# ------------------------------------------------------------------ evaluation and callbacks


def _evaluate(rank: int, world: int, folder: str) -> dict[str, Any]:
    class Stops(TrainerCallback):
        seen: tuple[str, ...] = ()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            landed = [p.grad is not None for p in kwargs["model"].parameters()]
            self.seen += ("gradients" if all(landed) else "none",)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen += ("evaluated",)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    stops = Stops()
    trainer = odc_trainer(
        folder,
        world,
        callbacks=[stops],
        eval_dataset=samples()[:7],
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=True,
        eval_steps=1,
        save_steps=1,
        dataloader_drop_last=True,  # which is for training: all are evaluated
        include_num_input_tokens_seen="all",
        learning_rate=1.0,  # so that it diverges, and the best step is not the last one
    )
    trainer.train()
    own = trainer.evaluate()["eval_loss"]
    return _summary(trainer, rank) | {
        "eval_loss": logs(trainer, "eval_loss"),
        "seen": stops.seen,
        "own": own,
        "best": trainer.state.best_global_step,
        "input_tokens": trainer.state.num_input_tokens_seen,
    }


def _both(rank: int, world: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return _evaluate(rank, world, f"{folder}/evaluated"), _metrics(rank, world, f"{folder}/metrics")


def test_evaluation_callbacks_and_metrics(tmp_path: Path) -> None:
    (first, metrics), (second, others_metrics) = ranks.run(_both, 2, str(tmp_path))
    _assert_best_model(first, second)
    _assert_metrics([metrics, others_metrics])


def _assert_best_model(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["eval_loss"] == second["eval_loss"]
    assert first["seen"] == ("gradients", "evaluated") * 4 + ("evaluated",)
    assert first["own"] == min(first["eval_loss"]) == first["eval_loss"][first["best"] - 1]
    assert first["best"] < 4
    taken = [len(sample["input_ids"]) for step in steps_in_order()[:4] for sample in step]
    assert first["input_tokens"] == second["input_tokens"] == sum(taken)
    model = build("qwen2").eval()
    model.load_state_dict(first["weights"])
    data = samples()[:7]
    with torch.no_grad():
        want = sum(sample_loss(model, sample) for sample in data) / targets(data)
    # Sums in another order, and packs against samples.
    torch.testing.assert_close(first["own"], want.item(), rtol=1e-6, atol=0)


def _metrics(rank: int, world: int, folder: str) -> dict[str, Any]:
    def accuracy(predicted: Any) -> dict[str, float]:
        words, labels = predicted.predictions[:, :-1].argmax(-1), predicted.label_ids[:, 1:]
        return {"right": int(((words == labels) & (labels != -100)).sum())}

    data = samples()[:6]
    trainer = odc_trainer(folder, world, compute_metrics=accuracy, data_collator=pad, per_device_eval_batch_size=2)
    trainer.train()
    trainer.eval_dataset = data
    evaluated, predicted = trainer.evaluate(), trainer.predict(data)
    _smooths_padded_batches(trainer, pad(data))
    trainer.compute_metrics = None
    result = _summary(trainer, rank) | {
        "right": evaluated["eval_right"],
        "shape": predicted.predictions.shape,
        "loss": trainer.evaluate()["eval_loss"],
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as where no torchrun started this
        os.environ.pop(name)
    with pytest.raises(ValueError, match="accelerate counts 1 processes, and the model has 2 ranks: start them with"):
        type(trainer)(trainer.model, arguments(folder))
    return result


def _smooths_padded_batches(trainer: Any, batch: dict[str, torch.Tensor]) -> None:
    trainer.label_smoother = LabelSmoother(0.3)
    with torch.no_grad():
        found, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    trainer.label_smoother = None
    predicted, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(predicted, labels, label_smoothing=0.3))


def _assert_metrics(results: list[dict[str, Any]]) -> None:
    assert [result["shape"] for result in results] == [(6, max(LENGTHS[:6]), 97)] * 2
    model = build("qwen2").eval()
    model.load_state_dict(results[0]["weights"])
    right, loss, tokens = 0, 0.0, targets(samples()[:6])
    for sample in samples()[:6]:
        words = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1].argmax(-1)
        right += int((words == torch.tensor(sample["labels"])[1:]).sum())
        loss += sample_loss(model, sample).item()
    assert [result["right"] for result in results] == [right, right]
    for result in results:  # sums come in another order
        assert result["loss"] == pytest.approx(loss / tokens, rel=1e-6)
    assert right > 0  # or a wrong mask would not show
