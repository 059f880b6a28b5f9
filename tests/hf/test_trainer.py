"""ODCTrainer on real ranks: against plain torch and a loop of our own; evaluation, checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks, slow
from tests.support.models import build
from tests.support.trainer_case import (
    LENGTHS,
    LR,
    STEPS,
    arguments,
    logs,
    odc_trainer,
    pad,
    sample_loss,
    samples,
    sharded_model,
    weights_of,
    with_adapters,
)

# ------------------------------------------------------------------ the same training


def _train(rank: int, world: int, folder: str, resume: str | bool | None = None, **changes: Any) -> dict[str, Any]:
    trainer = odc_trainer(folder, world, **changes)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return _summary(trainer, rank)


def _summary(trainer: Any, rank: int) -> dict[str, Any]:
    result = {key: logs(trainer, key) for key in ("loss", "grad_norm", "target_tokens", "learning_rate")}
    # One rank alone: reads are one-sided.
    return result | {"weights": weights_of(trainer.model) if rank == 0 else None}


def _deterministic(rank: int, world: int, folder: str, resume: str | None) -> dict[str, torch.Tensor]:
    from odc_triton.hf import ODCTrainer

    changes = {"full_determinism": True, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    model = sharded_model(exact=True)
    ODCTrainer(model, arguments(folder, **changes), train_dataset=samples()).train(resume_from_checkpoint=resume)
    return weights_of(model)


def test_full_determinism_on_exact_sums(tmp_path: Path) -> None:
    """A run that went on from another's checkpoint ends with the same bits."""
    folders = [str(tmp_path / name) for name in ("one", "resumed")]
    want = _run(_deterministic, 2, folders[0], None)[0]
    found = _run(_deterministic, 2, folders[1], f"{folders[0]}/checkpoint-2")[0]
    assert all(torch.equal(found[name], weight) for name, weight in want.items())


def _train_one_sample_a_step(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A rank has one pack or none."""
    from odc_triton.balance import MinibatchSampler
    from odc_triton.engine.api import events

    sampler = MinibatchSampler(LENGTHS, 1, max(LENGTHS), seed=42, rank=rank, world=world)
    sampler.samples_per_minibatch = 1
    trainer = odc_trainer(folder, 1, sampler=sampler)
    events(trainer.model)
    trainer.train()
    seen = events(trainer.model)
    return _summary(trainer, rank) | {
        "meetings": [e.label for e in seen if e.kind == "wait" and "minibatch" in e.label],
        "forwards": sorted({e.minibatch for e in seen if e.kind == "forward"}),
    }


def _plain(samples_per_step: int, *, lora: bool = False) -> dict[str, Any]:
    """The same in plain torch: a whole model, each sample by itself, transformers' parameter groups and schedule."""
    from transformers import get_linear_schedule_with_warmup

    from odc_triton.balance import MinibatchSampler

    data, model = samples(), build("qwen2").train()
    model = with_adapters(model, 0) if lora else model
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    sampler = MinibatchSampler(LENGTHS, samples_per_step, max(LENGTHS), seed=42, rank=0, world=1)
    minibatches = [packs for _ in range(STEPS) for packs in sampler][:STEPS]
    result: dict[str, Any] = {"loss": [], "grad_norm": [], "target_tokens": []}
    for packs in minibatches:
        chosen = [data[index] for pack in packs for index in pack]
        tokens = sum(label != -100 for sample in chosen for label in sample["labels"][1:])
        loss = sum(sample_loss(model, sample) for sample in chosen) / tokens
        loss.backward()
        result["grad_norm"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        result["loss"].append(loss.item())
        result["target_tokens"].append(tokens)
    return result | {"weights": dict(model.named_parameters())}


def _assert_alike(results: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for result in results:
        assert result["target_tokens"] == plain["target_tokens"]
        # The order of fp32 sums differs: packs against samples, and over ranks. Trainer rounds neither loss nor norm.
        torch.testing.assert_close(result["loss"], plain["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(result["grad_norm"], plain["grad_norm"], rtol=1e-4, atol=0)
    for name, want in plain["weights"].items():
        # By norm: Adam turns a gradient that is all rounding into steps of up to the learning rate. That of a bias
        # of keys is nearly so, as softmax takes out what all keys share: hence a thousandth of a step besides.
        floor = 1e-3 * LR if name.endswith("k_proj.bias") else 0.0
        error = (results[0]["weights"][name] - want).norm()
        assert error <= 1e-4 * want.norm() + floor, f"{name}: {error}"


@pytest.mark.parametrize("world", [1, 2])
def test_as_plain_torch(tmp_path: Path, world: int) -> None:
    # Exact sums: else the order in which ranks add decides how far a bias of keys is off.
    _assert_alike(_run(_train, world, str(tmp_path), exact=world > 1 or None), _plain(4))


def test_ranks_without_packs(tmp_path: Path) -> None:
    results = ranks.run(_train_one_sample_a_step, 2, str(tmp_path))
    _assert_alike(results, _plain(1))
    assert sorted(result["forwards"] for result in results) == [[], list(range(STEPS))]
    for result in results:
        steps = ("enter", "leave", "sum up")
        assert result["meetings"] == [f"{what} minibatch {i}" for i in range(STEPS) for what in steps]


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("bf16", [False, slow(True)])
def test_resume(tmp_path: Path, bf16: bool) -> None:
    """From the middle of an epoch (2 of 3 steps) and from its end (3), on as many ranks and on fewer."""
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 4, "bf16_shards": bf16}
    whole = _run(_train, 2, str(tmp_path / "whole"), **changes)
    assert sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))[0] == "checkpoint-2"
    for world, step in [(2, 2), (1, 3)]:
        folder = str(tmp_path / f"resumed-{world}")
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        results = _run(_train, world, folder, resume=checkpoint, seed=9, bf16_shards=bf16)
        for result in results:
            for key in ("loss", "grad_norm", "target_tokens", "learning_rate"):
                # The same masters and moments; sums over ranks and, on another world, packs come in another order.
                # In bf16 another pack of the same documents rounds otherwise.
                tolerance = 1e-5 if not bf16 else 2e-2
                got = result[key][-(STEPS - step) :]
                torch.testing.assert_close(got, whole[0][key][step:], rtol=tolerance, atol=0)
            assert len(result["loss"]) == STEPS  # the log's history is the checkpoint's and the new steps'
    with pytest.raises(AssertionError, match="has no complete odc/ folder"):
        _run(_train, 1, str(tmp_path / "none"), resume=str(tmp_path / "resumed-1" / "final"))


def _run(function: Any, world: int, *args: Any, **changes: Any) -> list[Any]:
    return ranks.run(_with_keywords, world, function, args, changes)


def _with_keywords(rank: int, world: int, function: Any, args: tuple, changes: dict[str, Any]) -> Any:
    return function(rank, world, *args, **changes)


@pytest.mark.slow
def test_resume_is_exact_on_one_rank(tmp_path: Path) -> None:
    (whole,) = _run(_train, 1, str(tmp_path / "whole"), save_strategy="steps", save_steps=2)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    (resumed,) = _run(_train, 1, str(tmp_path / "resumed"), resume=checkpoint, seed=9)
    assert resumed["loss"] == whole["loss"]
    # As it was once written: odc/ is torch.distributed.checkpoint's only, and the sampler's position lies beside it.
    copy = shutil.copytree(checkpoint, tmp_path / "old" / "checkpoint-2")
    position = json.loads((copy / "odc" / "state.json").read_text())["sampler"]
    (copy / "odc_sampler.json").write_text(json.dumps(position))
    for path in (copy / "odc").glob("*.json"):
        path.unlink()
    (old,) = _run(_train, 1, str(tmp_path / "old"), resume=True, seed=9)
    assert old["loss"] == whole["loss"]
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name
        assert torch.equal(old["weights"][name], value), name


# PEFT asks transformers by a name that is going away.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters(tmp_path: Path) -> None:
    """PEFT's model trains as in plain torch; its checkpoints and its folder have the adapters only."""
    import peft

    from odc_triton.checkpoint.dcp import read_metadata, tensors_of

    whole = _run(_train, 2, str(tmp_path / "whole"), lora=True, save_strategy="steps", save_steps=2)
    _assert_alike(whole, _plain(4, lora=True))
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    names = tensors_of(read_metadata(checkpoint / "odc"))
    assert sum(name.startswith("model.") for name in names) == 8  # A and B of two projections in two layers
    assert json.loads((checkpoint / "odc" / "base.json").read_text())["name"] == "the/base"
    final = tmp_path / "whole" / "final"
    for folder in (checkpoint, final):
        files = {path.name for path in folder.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        assert "model.safetensors" not in files
    for name, value in peft.PeftModel.from_pretrained(build("qwen2"), final).named_parameters():
        assert torch.equal(value, whole[0]["weights"][name]), name
    (resumed,) = _run(_train, 1, str(tmp_path / "resumed"), resume=str(checkpoint), seed=9, lora=True)
    # The same masters and moments; sums over ranks come in another order.
    torch.testing.assert_close(resumed["loss"][2:], whole[0]["loss"][2:], rtol=1e-5, atol=0)


@pytest.mark.slow
def test_another_step_size_is_refused(tmp_path: Path) -> None:
    _run(_train, 1, str(tmp_path), save_strategy="steps", save_steps=2)
    with pytest.raises(AssertionError, match="samples_per_minibatch 4, here it is 8"):
        _run(_resume_with_larger_steps, 2, str(tmp_path))


def _resume_with_larger_steps(rank: int, world: int, folder: str) -> None:
    odc_trainer(folder, 1).train(resume_from_checkpoint=True)  # four samples a rank


def test_saved_models(tmp_path: Path) -> None:
    """`save_model` and a checkpoint's folder are for plain transformers: the same weights, identical logits."""
    from transformers import AutoModelForCausalLM

    result, _ = _run(_train, 2, str(tmp_path), save_strategy="steps", save_steps=STEPS, save_only_model=True)
    assert not (tmp_path / f"checkpoint-{STEPS}" / "odc").exists()
    ids = torch.tensor([[5, 9, 3, 17, 40, 2]])
    want = build("qwen2").eval()
    want.load_state_dict(result["weights"])
    for folder in ("final", f"checkpoint-{STEPS}"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder, attn_implementation="eager")
        assert torch.equal(loaded(ids).logits, want(ids).logits)
        assert (tmp_path / folder / "training_args.bin").exists()


# ------------------------------------------------------------------ evaluation and callbacks


def _evaluate(rank: int, world: int, folder: str) -> dict[str, Any]:
    from transformers import TrainerCallback

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


def test_evaluation_callbacks_and_the_best_model(tmp_path: Path) -> None:
    from odc_triton.balance import MinibatchSampler

    first, second = _run(_evaluate, 2, str(tmp_path))
    assert first["eval_loss"] == second["eval_loss"]
    assert first["seen"] == ("gradients", "evaluated") * 4 + ("evaluated",)
    assert first["own"] == min(first["eval_loss"]) == first["eval_loss"][first["best"] - 1]
    assert first["best"] < 4
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS), seed=42, rank=0, world=1)
    fourth = [LENGTHS[index] for pack in sampler.assignment(1, 0)[0] for index in pack]
    assert first["input_tokens"] == second["input_tokens"] == sum(LENGTHS) + sum(fourth)
    model = build("qwen2").eval()
    model.load_state_dict(first["weights"])
    data = samples()[:7]
    tokens = sum(label != -100 for sample in data for label in sample["labels"][1:])
    with torch.no_grad():
        want = sum(sample_loss(model, sample) for sample in data) / tokens
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
    trainer.compute_metrics = None
    result = _summary(trainer, rank) | {
        "right": evaluated["eval_right"],
        "shape": predicted.predictions.shape,
        "losses": [evaluated["eval_loss"], predicted.metrics["test_loss"], trainer.evaluate()["eval_loss"]],
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as where no torchrun started this
        os.environ.pop(name)
    with pytest.raises(ValueError, match="accelerate counts 1 processes, and the model has 2 ranks: start them with"):
        type(trainer)(trainer.model, arguments(folder))
    return result


def test_metrics_and_predictions(tmp_path: Path) -> None:
    for result in (results := _run(_metrics, 2, str(tmp_path))):
        assert result["shape"] == (6, max(LENGTHS[:6]), 97)
    model = build("qwen2").eval()
    model.load_state_dict(results[0]["weights"])
    right, loss, tokens = 0, 0.0, 0
    for sample in samples()[:6]:
        words = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1].argmax(-1)
        right += int((words == torch.tensor(sample["labels"])[1:]).sum())
        loss += sample_loss(model, sample).item()
        tokens += sum(label != -100 for label in sample["labels"][1:])
    assert [result["right"] for result in results] == [right, right]
    for result in results:  # the mean over all tokens, whatever the batches; sums come in another order
        assert result["losses"] == pytest.approx([loss / tokens] * 3, rel=1e-6)
    assert right > 0  # or a wrong mask would not show
