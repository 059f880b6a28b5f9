"""ODCTrainer on real ranks: against plain torch and a loop of our own; evaluation, checkpoints, wrong input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from . import ranks
from .models import build

LENGTHS = [5, 17, 9, 26, 3, 12, 7, 21, 4, 15, 6, 11]
STEPS = 5
LR = 1e-2


def samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    # A third of each sample is a prompt, which is not learned.
    return [{"input_ids": x, "labels": [-100] * (len(x) // 3) + x[len(x) // 3 :]} for x in ids]


def _arguments(folder: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    # As under torchrun; accelerate asks for them, and then finds the process group that there is.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    wanted = {
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": LR,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "optim": "adamw_torch",
    }
    return TrainingArguments(**wanted | changes)


def _sharded(seed: int = 0) -> nn.Module:
    from odc_triton import fully_shard
    from odc_triton.hf import enable_packing

    model = build("qwen2", seed)
    enable_packing(model)
    return fully_shard(model)


def _trainer(folder: str, world: int, *, seed: int = 0, **changes: Any) -> Any:
    """A step takes four samples, whatever the world."""
    from odc_triton.hf import ODCTrainer

    kwargs = {name: changes.pop(name) for name in ("sampler", "callbacks", "eval_dataset") if name in changes}
    args = _arguments(folder, per_device_train_batch_size=4 // world, **changes)
    return ODCTrainer(_sharded(seed), args, train_dataset=samples(), **kwargs)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    from odc_triton import full_parameters

    return {name: value.clone() for name, value in full_parameters(model)}


def _logs(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# ------------------------------------------------------------------ the same training


def _train(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    trainer = _trainer(folder, world, **changes)
    trainer.train()
    return {
        "loss": _logs(trainer, "loss"),
        "grad_norm": _logs(trainer, "grad_norm"),
        "tokens": _logs(trainer, "target_tokens"),
        "weights": _weights(trainer.model) if rank == 0 else None,
    }


def _plain(steps: int = STEPS) -> dict[str, Any]:
    """The same in plain torch: a whole model, each sample by itself, transformers' parameter groups and schedule."""
    from transformers import get_linear_schedule_with_warmup

    from odc_triton.balance import MinibatchSampler

    data, model = samples(), build("qwen2").train()
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS), seed=42, rank=0, world=1)
    result: dict[str, Any] = {"loss": [], "grad_norm": [], "tokens": []}
    while len(result["loss"]) < steps:
        for packs in sampler:
            chosen = [data[index] for pack in packs for index in pack]
            tokens = sum(label != -100 for sample in chosen for label in sample["labels"][1:])
            loss = torch.zeros(())
            for sample in chosen:
                ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
                loss = loss + F.cross_entropy(logits, labels[1:], reduction="sum") / tokens
            loss.backward()
            result["grad_norm"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            result["loss"].append(loss.item())
            result["tokens"].append(tokens)
            if len(result["loss"]) == steps:
                break
    return result | {"weights": dict(model.named_parameters()), "model": model}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return _plain()


@pytest.mark.parametrize("world", [1, 2, 5])
def test_as_plain_torch(tmp_path: Path, plain: dict[str, Any], world: int) -> None:
    """On five ranks a step's four samples leave ranks without packs: the sampler is given, as 4 // 5 is no number."""
    function = _train if world < 5 else _train_few_samples
    results = ranks.run(function, world, str(tmp_path), {})
    for result in results:
        assert result["tokens"] == plain["tokens"]
        # The order of fp32 sums differs: packs against samples, ranks. Trainer rounds neither loss nor norm.
        torch.testing.assert_close(result["loss"], plain["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(result["grad_norm"], plain["grad_norm"], rtol=1e-4, atol=0)
    for name, want in plain["weights"].items():
        # Adam turns a gradient of rounding errors into a step of up to lr: compared by norm, see shared facts.
        error = (results[0]["weights"][name] - want).norm() / want.norm()
        assert error < 1e-4, f"{name}: {error}"


def _train_few_samples(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    from odc_triton.balance import MinibatchSampler

    class Sampler(MinibatchSampler):
        """Four samples a minibatch, dealt to five ranks."""

        def __init__(self) -> None:
            super().__init__(LENGTHS, 1, max(LENGTHS), seed=42, rank=rank, world=world)
            self.samples_per_minibatch = 4

    trainer = _trainer(folder, 1, sampler=Sampler(), **changes)
    trainer.train()
    return {
        "loss": _logs(trainer, "loss"),
        "grad_norm": _logs(trainer, "grad_norm"),
        "tokens": _logs(trainer, "target_tokens"),
        "weights": _weights(trainer.model) if rank == 0 else None,
    }
