"""A small job of ODCTrainer, for its tests: the same steps whatever the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.families import with_lora
from tests.support.models import build
from tests.support.parity import whole_model_error

LENGTHS = [5, 17, 9, 26, 3, 12, 7, 21, 4, 15, 6, 11]
STEPS = 5
LR = 1e-2


def samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    # A third of each sample is a prompt, which is not learned.
    return [{"input_ids": x, "labels": [-100] * (len(x) // 3) + x[len(x) // 3 :]} for x in ids]


class Streamed(torch.utils.data.IterableDataset):
    """Of an iterator it can be read once."""

    def __init__(self, given: Iterable[Any]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


def arguments(folder: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    if "RANK" in os.environ:  # as under torchrun; accelerate asks for them, and then takes the group that there is
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
        "optim": "adamw_torch",
    }
    return TrainingArguments(**wanted | changes)


def adapted(model: nn.Module, seed: int) -> nn.Module:
    model.name_or_path = "the/base"
    return with_lora(model, ("q_proj", "down_proj"), seed)


def sharded_model(seed: int = 0, bf16: bool = False, exact: bool | None = None, lora: bool = False) -> nn.Module:
    """`lora`: the base is always the same, and `seed` is that of its adapters."""
    from odc_triton import MixedPrecisionPolicy, fully_shard
    from odc_triton.hf import enable_packing

    model = build("qwen2", 0 if lora else seed)
    enable_packing(model)
    model = adapted(model, seed) if lora else model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    return fully_shard(model, mp_policy=policy, exact=exact)


_OF_TRAINER = ("sampler", "callbacks", "eval_dataset", "compute_metrics", "data_collator")


def odc_trainer(
    folder: str,
    world: int,
    *,
    seed: int = 0,
    bf16_shards: bool = False,
    exact: bool | None = None,
    lora: bool = False,
    **changes: Any,
) -> Any:
    """A step takes four samples, whatever the world."""
    from odc_triton.hf import ODCTrainer

    given = {name: changes.pop(name) for name in _OF_TRAINER if name in changes}
    args = arguments(folder, **{"per_device_train_batch_size": 4 // world} | changes)
    return ODCTrainer(sharded_model(seed, bf16_shards, exact, lora), args, train_dataset=samples(), **given)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    from odc_triton import full_parameters

    return {name: value.clone() for name, value in full_parameters(model)}


def assert_weights_alike(
    found: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-4
) -> None:
    """By norm: Adam turns a gradient that is all rounding into steps of up to the learning rate."""
    assert found.keys() == want.keys()
    assert whole_model_error(found, want) <= tolerance


def logs(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def sample_loss(model: nn.Module, sample: dict[str, list[int]]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([sample["input_ids"]]), use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, torch.tensor(sample["labels"])[1:], reduction="sum")


def steps_in_order(count: int = 4) -> list[list[dict[str, list[int]]]]:
    """The samples that each of `STEPS` steps of `count` takes, in the order of ODCTrainer."""
    from odc_triton.balance import MinibatchSampler

    data, sampler = samples(), MinibatchSampler(LENGTHS, count, max(LENGTHS), seed=42, rank=0, world=1)
    steps = [packs for _ in range(STEPS) for packs in sampler][:STEPS]
    return [[data[index] for pack in packs for index in pack] for packs in steps]


def in_order(count: int = 4) -> list[dict[str, list[int]]]:
    return [sample for step in steps_in_order(count) for sample in step]


def targets(of: list[dict[str, list[int]]]) -> int:
    return sum(label != -100 for sample in of for label in sample["labels"][1:])


def plain_trainer(folder: str, *, lora: bool = False, seed: int = 0, count: int = 4, **changes: Any) -> Any:
    """transformers' own Trainer on a whole model: the steps of `odc_trainer`, one sample a microbatch; `count`: samples
    of a step.
    """
    from transformers import Trainer

    given = {name: changes.pop(name) for name in _OF_TRAINER if name in changes}
    args = arguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=count,
        train_sampling_strategy="sequential",
        **{"use_cpu": True} | changes,
    )
    model = adapted(build("qwen2"), seed) if lora else build("qwen2", seed)
    return Trainer(model, args, train_dataset=in_order(count), **{"data_collator": pad} | given)


def pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in batch)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [sample | {"attention_mask": [1] * len(sample["input_ids"])} for sample in batch]
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }
