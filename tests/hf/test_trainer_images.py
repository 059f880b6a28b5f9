"""ODCTrainer on samples with pictures, against transformers' own Trainer on whole models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odc_triton import fully_shard
from odc_triton.hf import ODCTrainer, enable_packing
from tests.support import ranks, slow
from tests.support.trainer_case import arguments, assert_weights_alike, logs, weights_of
from tests.support.vision import FAMILIES, alone

# Tokens of text, pictures: a step has two samples, so that at most steps a rank has no picture.
SIZES = [(9, 2), (17, 0), (26, 0), (12, 1), (7, 0), (15, 0)]


def samples(family: str) -> list[dict[str, Any]]:
    return FAMILIES[family].samples(SIZES)


def sharded(family: str, seed: int = 0) -> nn.Module:
    model = FAMILIES[family].model(seed)
    enable_packing(model)
    return fully_shard(model)


def _changes(world: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": 2 // world, "max_steps": 3, "warmup_steps": 0}


def _train(rank: int, world: int, folder: str, family: str) -> dict[str, Any]:
    from datasets import Dataset

    data = Dataset.from_list(samples(family))  # of lists, with None for what a sample does not have
    args = arguments(folder, **_changes(world))
    trainer = ODCTrainer(sharded(family), args, train_dataset=data, eval_dataset=samples(family)[:3])
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    return {name: logs(trainer, name) for name in ("loss", "grad_norm", "total_flos")} | {
        "weights": weights_of(trainer.model) if rank == 0 else None,
        "eval_loss": evaluated,
    }


def _plain(folder: str, family: str) -> dict[str, Any]:
    from transformers import Trainer

    from odc_triton.balance import MinibatchSampler

    class Plain(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Tensor:
            return _loss(model, inputs["sample"]) / num_items_in_batch

    data = samples(family)
    lengths = [len(each["input_ids"]) for each in data]
    order = MinibatchSampler(lengths, 2, max(lengths), seed=42, rank=0, world=1)
    train = [data[index] for packs in order for pack in packs for index in pack]
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = arguments(folder, **_changes(1) | changes, train_sampling_strategy="sequential", use_cpu=True)
    args.remove_unused_columns = False
    trainer = Plain(
        FAMILIES[family].model(),
        args,
        train_dataset=train,
        data_collator=lambda batch: {"labels": torch.tensor([batch[0]["labels"]]), "sample": batch[0]},
    )
    trainer.model_accepts_loss_kwargs = True  # the loss is divided by the step's targets
    trainer.train()
    model = trainer.model.eval()
    with torch.no_grad():
        loss = sum(_loss(model, each) for each in data[:3])
    return {name: logs(trainer, name) for name in ("loss", "grad_norm")} | {
        "weights": {name: value.detach() for name, value in model.named_parameters()},
        "eval_loss": float(loss) / sum(label != -100 for each in data[:3] for label in each["labels"][1:]),
    }


def _loss(model: nn.Module, sample: dict[str, Any]) -> Tensor:
    return F.cross_entropy(alone(model, sample)[:-1], torch.tensor(sample["labels"])[1:], reduction="sum")


@pytest.mark.parametrize("family", ["qwen2_5_vl", *(slow(name) for name in FAMILIES if name != "qwen2_5_vl")])
def test_as_plain(tmp_path: Path, family: str) -> None:
    plain = _plain(str(tmp_path / "plain"), family)
    results = ranks.run(_train, 2, str(tmp_path / "odc"), family)
    for result in results:
        torch.testing.assert_close(result["loss"], plain["loss"], rtol=1e-4, atol=0)  # sums in another order
        torch.testing.assert_close(result["grad_norm"], plain["grad_norm"], rtol=1e-3, atol=0)
        assert result["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-3)
        assert result["total_flos"][-1] > 0
    assert_weights_alike(results[0]["weights"], plain["weights"], tolerance=1e-3)


def test_costs_count_the_tower(tmp_path: Path) -> None:
    """Texts alike: without the pictures' costs any two of them would go to a rank. A frozen tower costs a third."""
    model = sharded("qwen2_5_vl")
    data = FAMILIES["qwen2_5_vl"].samples([(9, 3), (9, 0), (9, 0), (9, 0)])
    found = []
    for trained in (True, False):
        for name, each in model.named_parameters():
            each.requires_grad = trained or "visual" not in name
        trainer = ODCTrainer(model, arguments(str(tmp_path)), train_dataset=data)
        found.append(trainer.get_train_dataloader().batch_sampler.assigner.extra)
    trained, frozen = found
    assert trained[0] > 0
    assert trained[1:] == frozen[1:] == [0, 0, 0]
    assert frozen[0] == pytest.approx(trained[0] / 3)


def pad(family: str, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows as the processors of Qwen-VL and Gemma3 make them."""
    longest = max(len(each["input_ids"]) for each in batch)
    fill = {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0}
    rows = [{"mm_token_type_ids": [0] * len(each["input_ids"])} | each for each in batch]
    made = {
        name: torch.tensor([each[name] + [value] * (longest - len(each[name])) for each in rows])
        for name, value in fill.items()
    }
    if family == "gemma3":
        made["token_type_ids"] = made.pop("mm_token_type_ids")
    made["attention_mask"] = torch.tensor([[at < len(each["input_ids"]) for at in range(longest)] for each in batch])
    seen = [name for name in ("pixel_values", "image_grid_thw") if any(name in each for each in batch)]
    return made | {name: torch.cat([each[name] for each in batch if name in each]) for name in seen}


@pytest.mark.parametrize(("family", "rows"), [("qwen2_5_vl", 1), ("qwen2_5_vl", 4), ("gemma3", 1), ("gemma3", 4)])
def test_evaluates_padded_rows(tmp_path: Path, family: str, rows: int) -> None:
    """For a `compute_metrics`, by a collator that can; the loss is that of packs. One row has no padding."""
    model, data = sharded(family), samples(family)
    args = arguments(str(tmp_path), per_device_eval_batch_size=rows, dataloader_pin_memory=False)
    by_packs = ODCTrainer(model, args, eval_dataset=data).evaluate()["eval_loss"]
    metrics = {"compute_metrics": lambda found: {"rows": len(found.predictions)}}
    trainer = ODCTrainer(model, args, eval_dataset=data, **metrics)
    for evaluate in (trainer.evaluate, lambda: trainer.predict(data)):
        with pytest.raises(ValueError, match="pictures, which the default data_collator can't put into padded rows"):
            evaluate()
    found = ODCTrainer(model, args, eval_dataset=data, data_collator=partial(pad, family), **metrics).evaluate()
    assert found["eval_rows"] == len(data)
    assert found["eval_loss"] == pytest.approx(by_packs, rel=1e-5)
