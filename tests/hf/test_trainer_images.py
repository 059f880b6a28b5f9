"""ODCTrainer on samples with images, against transformers' own Trainer on whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, Trainer

from odc_triton import fully_shard
from odc_triton.balance import MinibatchSampler
from odc_triton.hf import ODCTrainer, enable_packing
from odc_triton.jobs.data.vision import read_processor
from odc_triton.plan.relatives import floor_of
from tests.support import ranks
from tests.support.families import with_lora
from tests.support.processors import make_processor
from tests.support.trainer_case import Streamed, arguments, assert_weights_alike, logs, weights_of
from tests.support.vision import FAMILIES, alone

# Tokens of text, images: a step has two samples, so that at most steps a rank has no image.
SIZES = [(9, 2), (17, 0), (26, 0), (12, 1), (7, 0), (15, 0)]


FAMILY = FAMILIES["qwen2_5_vl"]


def sharded(family: str = "qwen2_5_vl") -> nn.Module:
    model = FAMILIES[family].model()
    enable_packing(model)
    return fully_shard(model)


def _changes(world: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": 2 // world, "max_steps": 3, "warmup_steps": 0}


def _train(rank: int, world: int, folder: str) -> dict[str, Any]:
    data = FAMILY.samples(SIZES)
    # Of lists, with None for what a sample does not have.
    given = {"train_dataset": Dataset.from_list(data), "eval_dataset": data[:3]}
    trainer = ODCTrainer(sharded(), arguments(folder, **_changes(world)), **given)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    return {name: logs(trainer, name) for name in ("loss", "grad_norm", "total_flos")} | {
        "weights": weights_of(trainer.model) if rank == 0 else None,
        "eval_loss": evaluated,
    }


def _plain(folder: str) -> dict[str, Any]:
    class Plain(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Tensor:
            return _loss(model, inputs["sample"]) / num_items_in_batch

    data = FAMILY.samples(SIZES)
    lengths = [len(each["input_ids"]) for each in data]
    order = MinibatchSampler(lengths, 2, max(lengths), seed=42, rank=0, world=1)
    train = [data[index] for packs in order for pack in packs for index in pack]
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = arguments(folder, **_changes(1) | changes, train_sampling_strategy="sequential", use_cpu=True)
    args.remove_unused_columns = False
    trainer = Plain(
        FAMILY.model(),
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


def test_as_plain(tmp_path: Path) -> None:
    plain = _plain(str(tmp_path / "plain"))
    results = ranks.run(_train, 2, str(tmp_path / "odc"))
    for result in results:
        torch.testing.assert_close(result["loss"], plain["loss"], rtol=1e-4, atol=0)  # sums in another order
        torch.testing.assert_close(result["grad_norm"], plain["grad_norm"], rtol=1e-3, atol=0)
        assert result["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-3)
        assert result["total_flos"][-1] > 0
    assert_weights_alike(results[0]["weights"], plain["weights"], tolerance=1e-3)


def test_costs_count_the_tower(tmp_path: Path) -> None:
    """Texts alike: without the images' costs any two of them would go to a rank. A frozen tower costs a third. And no
    sample would be cut before its last image.
    """
    model = sharded()
    data = FAMILY.samples([(9, 3), (9, 0), (9, 0), (9, 0)])
    found = []
    for trained in (True, False):
        for name, each in model.named_parameters():
            each.requires_grad = trained or "visual" not in name
        trainer = ODCTrainer(model, arguments(str(tmp_path)), train_dataset=data)
        rows = trainer.get_train_dataloader().batch_sampler._samples
        assert rows.earliest_cuts == [floor_of(each) for each in data]
        found.append(rows.extra)
    trained, frozen = found
    assert trained[0] > 0
    assert trained[1:] == frozen[1:] == [0, 0, 0]
    assert frozen[0] == pytest.approx(trained[0] / 3)


def test_costs_of_a_stream_count_the_tower(tmp_path: Path) -> None:
    """The sample with images is alone on its rank. It has as many tokens as each of the others."""
    (seen,) = FAMILY.samples([(9, 3)])
    data = [seen, *FAMILY.samples([(len(seen["input_ids"]), 0)] * 3)]
    assert len({len(each["input_ids"]) for each in data}) == 1
    trainer = ODCTrainer(sharded(), arguments(str(tmp_path)), train_dataset=Streamed(data))
    collate = trainer.get_train_dataloader().collate_fn
    found = [collate(data, rank=rank, ranks=2) for rank in range(2)]
    assert sorted(sum(len(pack["cu_seq_lens_q"]) - 1 for pack in packs) for packs in found) == [1, 3]


def test_padded_rows_are_refused(tmp_path: Path) -> None:
    data = FAMILIES["llava"].samples(SIZES)
    trainer = ODCTrainer(sharded("llava"), arguments(str(tmp_path)), eval_dataset=data)
    trainer.compute_metrics = lambda found: {}
    for evaluate in (trainer.evaluate, lambda: trainer.predict(data)):
        with pytest.raises(ValueError, match="sees images, and compute_metrics and predict pad batches"):
            evaluate()


def _adapted(rank: int, world: int, folder: str, lora: tuple[str, ...]) -> dict[str, Tensor] | None:
    model = FAMILY.model()
    enable_packing(model)
    model.name_or_path = f"{folder}/../base"
    data, processor = FAMILY.samples(SIZES), make_processor("qwen2_5_vl")
    args = arguments(folder, **_changes(world))
    trainer = ODCTrainer(fully_shard(with_lora(model, lora)), args, train_dataset=data, processing_class=processor)
    trainer.train()
    trainer.save_model()
    return weights_of(trainer.model) if rank == 0 else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
def test_adapters_of_the_tower_are_saved(tmp_path: Path) -> None:
    """And of the text. PEFT answers the same."""
    import peft

    lora, base = ("q_proj", "fc1", "qkv", "up_proj"), FAMILY.model()
    base.save_pretrained(tmp_path / "base")
    weights, _ = ranks.run(_adapted, 2, str(tmp_path / "out"), lora)
    adapted = with_lora(base, lora)
    trained = adapted.state_dict()
    for name, value in weights.items():
        trained[name].copy_(value)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    plain = peft.PeftModel.from_pretrained(plain, tmp_path / "out").get_base_model()
    asked = FAMILY.samples(SIZES)[0]
    with torch.no_grad():
        assert torch.equal(alone(plain.eval(), asked), alone(adapted.get_base_model().eval(), asked))
    made, read = make_processor("qwen2_5_vl"), read_processor(tmp_path / "out")
    assert type(read) is type(made)
    assert read.image_processor.to_dict() == made.image_processor.to_dict()
    assert read.chat_template == made.chat_template
