"""ODCSFTTrainer on TRL's own data sets with images, against SFTTrainer alone."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from odc_triton import fully_shard
from odc_triton.balance import MinibatchSampler
from odc_triton.hf import ODCTrainer, enable_packing
from odc_triton.jobs.trainers.image_records import ImageRecords
from tests.support import ranks
from tests.support.processors import image, make_processor
from tests.support.sft_images import fit_vocabulary
from tests.support.trainer_case import arguments, assert_weights_alike, weights_of
from tests.support.trl_case import COMMON, environment
from tests.support.vision import FAMILIES

COMPARED = {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss"}
IMAGES = [2, 0, 0, 1, 0, 0]  # of each record; a step has two


def records(kind: str) -> list[dict[str, Any]]:
    """As TRL's documentation has them."""
    made = []
    for index, count in enumerate(IMAGES):
        asked = [{"role": "user", "content": f"What are these {index}?"}]
        answer = [{"role": "assistant", "content": f"Noise {'again ' * index}."}]
        turns = {"messages": asked + answer} if kind == "messages" else {"prompt": asked, "completion": answer}
        made.append(turns | {"images": [image(20 + 4 * index, 12, seed) for seed in range(count)]})
    return made


def model_for(family: str, processor: Any) -> nn.Module:
    model = FAMILIES[family].model()
    torch.manual_seed(1)
    fit_vocabulary(model, processor)
    return model


def _train(rank: int, world: int, folder: str, family: str, kind: str, plain: bool) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from odc_triton.hf import ODCSFTTrainer

    environment()
    data, processor = records(kind), make_processor(family)
    model = model_for(family, processor)
    changes: dict[str, Any] = {}
    if plain:
        order = MinibatchSampler([1] * len(data), 2, len(data), seed=42, rank=0, world=1)
        data = [data[index] for packs in order for pack in packs for index in pack]
        changes = {"train_sampling_strategy": "sequential"}
    else:
        enable_packing(model)
        model = fully_shard(model)
    changes |= {"per_device_train_batch_size": 2 // world, "per_device_eval_batch_size": len(data), "max_length": None}
    changes |= {"learning_rate": 1e-2, "optim": "adamw_torch", "gradient_checkpointing": False}
    args = SFTConfig(folder, **COMMON | {"dataloader_pin_memory": False} | changes)
    given = {"eval_dataset": Dataset.from_list(records(kind)), "processing_class": processor}
    trainer = (SFTTrainer if plain else ODCSFTTrainer)(model, args, train_dataset=Dataset.from_list(data), **given)
    trainer.train()
    trainer.evaluate()
    weights = dict(model.named_parameters()) if plain else weights_of(model) if rank == 0 else {}
    return {"logs": trainer.state.log_history, "weights": {name: value.detach() for name, value in weights.items()}}


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2_5_vl", "messages"), ("gemma3", "completion"), ("idefics3", "messages"), ("llava", "completion")],
)
def test_as_trl(tmp_path: Path, family: str, kind: str) -> None:
    """Losses, metrics and weights."""
    (plain,) = ranks.run(_train, 1, str(tmp_path / "plain"), family, kind, True)
    results = ranks.run(_train, 2, str(tmp_path / "odc"), family, kind, False)
    for result in results:
        for got, want in zip(result["logs"], plain["logs"], strict=True):
            for name in COMPARED & want.keys():
                assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name
    assert_weights_alike(results[0]["weights"], plain["weights"], tolerance=1e-3)


def collate(processor: Any, batch: list[dict[str, Any]]) -> dict[str, Any]:
    """A user's own, of one record."""
    (record,) = batch
    text = processor.apply_chat_template(record["messages"])
    made = processor(
        images=record["images"] or None, text=text, return_tensors="pt", padding="max_length", max_length=60
    )
    return {**made, "labels": made["input_ids"].clone()}


def test_records_become_samples(tmp_path: Path) -> None:
    """One by one; a bad one is named."""
    processor = make_processor("llava")
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    data = [
        {"messages": [{"role": "user", "content": parts}], "images": [image()]},
        {"messages": [{"role": "user", "content": parts[1:]}], "images": None},
        {"messages": [{"role": "user", "content": parts}], "image": image(), "images": ["one too many"]},
    ]
    model = model_for("llava", processor)
    enable_packing(model)
    args = arguments(str(tmp_path), per_device_train_batch_size=2, max_steps=1)
    given = {"data_collator": partial(collate, processor), "processing_class": processor}
    trainer = ODCTrainer(fully_shard(model), args, train_dataset=data[:2], **given)
    seen, text = (trainer._samples(data)[index] for index in range(2))
    assert seen["mm_token_type_ids"].sum() == 16
    assert "pixel_values" not in text
    assert all(processor.tokenizer.pad_token_id not in each["input_ids"] for each in (seen, text))
    (packs,) = trainer.get_train_dataloader()
    assert sum(pack["input_ids"].numel() for pack in packs) == len(seen["input_ids"]) + len(text["input_ids"])
    trainer.train()
    with pytest.raises(ValueError, match=r"record 2 can't be collated \(.*: correct it, or give a data_collator"):
        trainer._samples(data)[2]
    with pytest.raises(ValueError, match=r"record 1: the data_collator returned no labels: "):
        ImageRecords(data, lambda batch: {"input_ids": torch.ones(1, 1)}, processor)[1]
