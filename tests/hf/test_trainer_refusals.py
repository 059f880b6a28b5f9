"""What ODCTrainer refuses, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from odc_triton import fully_shard
from odc_triton.balance import MinibatchSampler, find_relatives
from odc_triton.hf import ODCTrainer, PackingUnsupported, enable_packing, summed_loss
from odc_triton.jobs.trainers.sharded_trainer import ShardedTrainer
from odc_triton.packs.collate import pack_collate
from tests.support.models import build
from tests.support.trainer_case import LENGTHS, arguments, odc_trainer, samples, sharded_model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy is 'group_by_length': samples are"),
        ({"optim": "adafactor"}, "optim is 'adafactor', which takes means over whole matrices"),
        ({"torch_compile": True}, "torch_compile=True: compile the model's blocks"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"optim": "lomo"}, "steps inside of the backward"),
        ({"optim": "paged_lion_8bit"}, "optim is 'paged_lion_8bit', which can't step shards: choose adamw_bnb_8bit"),
        ({"save_only_model": True, "load_best_model_at_end": True, "save_strategy": "steps"}, "leave save_only_model"),
        ({"data_collator": lambda batch: batch}, "training packs samples without padding"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    if "load_best_model_at_end" in changes:
        changes = changes | {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    with pytest.raises(ValueError, match=words):
        odc_trainer(str(tmp_path), 1, **changes)


def test_other_ways_to_train_are_refused(tmp_path: Path) -> None:
    """Set on the arguments afterwards: TrainingArguments itself wants a GPU, or a package, for some of them."""
    model, names = sharded_model(), ("fp16", "fsdp", "deepspeed", "full_determinism", "save_on_each_node")
    for name in (*names, "packing", "activation_offloading"):
        args = arguments(str(tmp_path))
        setattr(args, name, True)
        with pytest.raises(ValueError, match=f"TrainingArguments has {name}=True: "):
            ODCTrainer(model, args, train_dataset=samples())


def test_fsdp_of_accelerates_launcher_is_refused(tmp_path: Path) -> None:
    """accelerate takes it from the environment, on GPUs only: here a subclass says that it did."""

    class Launched(ODCTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.is_fsdp_enabled = True

    with pytest.raises(ValueError, match="accelerate was started with fsdp"):
        Launched(sharded_model(), arguments(str(tmp_path)), train_dataset=samples())


def test_models_are_refused(tmp_path: Path) -> None:
    args = arguments(str(tmp_path))
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM is not sharded: call odc_triton.hf.enable_packing"):
        ODCTrainer(build("qwen2"), args, train_dataset=samples())
    with pytest.raises(TypeError, match="model is a ODCLinear; give the transformers model"):
        ODCTrainer(fully_shard(nn.Linear(3, 3)), args, train_dataset=samples())
    unpacked = ODCTrainer(fully_shard(build("qwen2")), args, train_dataset=samples())
    with pytest.raises(ValueError, match="two samples fit into a pack"):
        unpacked.train()
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS), rank=1, world=3)
    with pytest.raises(ValueError, match="sampler is of rank 1 of 3, the model of rank 0 of 1"):
        ODCTrainer(sharded_model(), args, train_dataset=samples(), sampler=sampler).train()
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS))
    with pytest.raises(
        ValueError, match=r"gradient_accumulation_steps=2 with a sampler.* 2 times the samples_per_rank"
    ):
        odc_trainer(str(tmp_path), 1, gradient_accumulation_steps=2, sampler=sampler)
    with pytest.raises(ValueError, match=r"peft_config is given, but the trainer takes a sharded model: call peft"):
        ODCTrainer(build("qwen2"), args, train_dataset=samples(), peft_config=object())
    with pytest.raises(TypeError, match="sampler is a list"):
        ODCTrainer(sharded_model(), args, train_dataset=samples(), sampler=[[0]]).train()


# PEFT asks transformers by a name that is going away.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_prompt_tuning_is_refused(tmp_path: Path) -> None:
    import peft

    model = build("qwen2")
    enable_packing(model)
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = fully_shard(peft.get_peft_model(model, options))
    words = "adapter 'default' is PROMPT_TUNING, whose virtual tokens .* such as peft.LoraConfig"
    with pytest.raises(ValueError, match=words):
        ODCTrainer(model, arguments(str(tmp_path)), train_dataset=samples())
    with pytest.raises(ValueError, match=words):
        summed_loss(model, pack_collate([samples()[:2]])[0])
    with pytest.raises(ValueError, match=words):
        enable_packing(peft.get_peft_model(build("qwen2"), options))


def test_classifiers_without_scores_of_tokens_are_refused() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForSequenceClassification

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    model = GPTNeoXForSequenceClassification(GPTNeoXConfig(vocab_size=97, num_labels=1, pad_token_id=0, **sizes))
    with pytest.raises(PackingUnsupported, match=r"GPTNeoXForSequenceClassification .* it gives a score of each row"):
        enable_packing(model)


def test_noise_in_segments_of_samples_is_refused(tmp_path: Path) -> None:
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS), relatives=find_relatives(samples()))
    args = arguments(str(tmp_path), neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match="neftune_noise_alpha with segments of samples"):
        ODCTrainer(sharded_model(), args, train_dataset=samples(), sampler=sampler)


def test_streams_are_refused(tmp_path: Path) -> None:
    model, given = sharded_model(), {"train_dataset": Streamed(samples())}
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS))
    for changes, options, words in (
        (
            {},
            {"sampler": sampler},
            "a sampler, split=True or .* with an IterableDataset, whose samples every rank reads",
        ),
        ({"dataloader_num_workers": 2}, {}, "dataloader_num_workers above 1 with an IterableDataset"),
        ({"max_steps": -1}, {}, "max_steps"),
    ):
        with pytest.raises(ValueError, match=words):
            ODCTrainer(model, arguments(str(tmp_path), **changes), **given, **options)
    args = arguments(str(tmp_path), save_strategy="steps", save_steps=1, max_steps=1)
    trainer = ODCTrainer(model, args, **given, eval_dataset=Streamed(samples()))
    with pytest.raises(TypeError, match="Streamed has no length: give a map-style data set"):
        trainer.evaluate()
    trainer.train()
    fewer = r"took samples by .*'samples_per_minibatch': 4.*, and this one by .*'samples_per_minibatch': 3"
    for changes, data, words in (
        ({"per_device_train_batch_size": 3}, Streamed(samples()), fewer),
        ({}, samples(), r"state has keys \['minibatch', 'samples_per_minibatch', 'streamed'\]"),
    ):
        args = arguments(str(tmp_path / "next"), **changes)
        with pytest.raises(ValueError, match=words):
            ODCTrainer(model, args, train_dataset=data).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-1")


def test_a_routers_loss_without_the_number_of_samples_is_refused(tmp_path: Path) -> None:
    class OwnBatches(ODCTrainer):
        def get_train_dataloader(self) -> list:
            return [pack_collate([samples()[:2]])]

    model = build("mixtral")
    model.config.output_router_logits = True
    enable_packing(model)
    model, args = fully_shard(model), arguments(str(tmp_path))
    with pytest.raises(ValueError, match="needs the samples of all ranks: use a MinibatchSampler's packs"):
        OwnBatches(model, args, train_dataset=samples()).train()


def test_data_is_refused(tmp_path: Path) -> None:
    class PlainBatches(ODCTrainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader([{"input_ids": torch.ones(3, dtype=torch.int64)}], batch_size=1)

    class Unsized(list):
        def __len__(self) -> int:
            raise TypeError("unknown length")

    args, model = arguments(str(tmp_path)), sharded_model()
    with pytest.raises(TypeError, match="a batch is a dict and not a list of packs"):
        PlainBatches(model, args, train_dataset=samples()).train()
    with pytest.raises(ValueError, match=r"sample 1 has \['text'\]: it needs input_ids"):
        ODCTrainer(model, args, train_dataset=[*samples()[:1], {"text": "a"}]).train()
    with pytest.raises(TypeError, match="generator has no length"):
        ODCTrainer(model, args, train_dataset=(sample for sample in samples())).train()
    with pytest.raises(ValueError, match="training needs a train_dataset"):
        ODCTrainer(model, args, eval_dataset=Unsized()).train()  # which others may evaluate
    with pytest.raises(ValueError, match="evaluation needs an eval_dataset"):
        ODCTrainer(model, args).evaluate()


class Drawn(list):
    """Samples whose labels are drawn at each access."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        self.reads = getattr(self, "reads", 0) + 1
        labels = torch.as_tensor(sample["input_ids"]).clone()
        labels[self.reads % len(labels)] = -100
        return {**sample, "labels": labels}


@pytest.mark.parametrize("shares", [True, False])
def test_samples_that_ranks_share_stay_as_they_are(tmp_path: Path, shares: bool) -> None:
    """Each rank would read its part of another sample. Without shared samples a draw at each access is fine."""

    def loader(kind: type) -> Any:
        data = kind(samples())
        relatives = find_relatives(samples()) if shares else None
        sizes = {"lengths": LENGTHS, "token_cap": max(LENGTHS), "relatives": relatives}
        sampler = MinibatchSampler(samples_per_rank=2, rank=0, world=1, **sizes)
        return ODCTrainer(sharded_model(), arguments(str(tmp_path)), train_dataset=data, sampler=sampler)

    loader(list).get_train_dataloader()
    trainer = loader(Drawn)
    if not shares:
        trainer.get_train_dataloader()
        return
    with pytest.raises(ValueError, match=r"sample \d+ has other tokens or labels each time it is read, and ranks that"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize(
    ("column", "how", "words"),
    [
        ("inputs_embeds", {}, "sample 0 has inputs_embeds, which the trainer would leave out"),
        ("label_ids", {"streamed": True}, "sample 0 has label_ids"),
        ("inputs_embeds", {"sampled": True}, "sample 0 has inputs_embeds"),
        ("loss_mask", {"remove_unused_columns": False}, "sample 0 has loss_mask"),  # which **kwargs would swallow
        ("token_type_ids", {}, None),  # not the model's
        ("loss_mask", {}, None),
    ],
)
def test_other_inputs_of_the_model_are_refused(tmp_path: Path, column: str, how: dict, words: str | None) -> None:
    """As transformers' Trainer has it, a column that the model does not name is left out."""
    data: Any = [{**sample, column: [0] * len(sample["input_ids"])} for sample in samples()]
    sampler = MinibatchSampler(LENGTHS, 4, max(LENGTHS), rank=0, world=1) if how.pop("sampled", False) else None
    data = Streamed(data) if how.pop("streamed", False) else data
    model = sharded_model()
    trainer = ODCTrainer(model, arguments(str(tmp_path), max_steps=1, **how), train_dataset=data, sampler=sampler)
    if words is None:
        trainer.train()
        return
    before = dict(model.state_dict())
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert all(torch.equal(value.full_tensor(), before[name].full_tensor()) for name, value in model.named_parameters())
    if not how:
        (pack,) = pack_collate([[samples()[0]]])
        with pytest.raises(ValueError, match=f"the pack has {column}, inputs that packs have no place for"):
            summed_loss(model, pack | {column: pack["input_ids"]})


class Streamed(torch.utils.data.IterableDataset):
    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def __iter__(self) -> Any:
        return iter(self.given)


def test_arguments_of_8_bit_adamw(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), optim="adamw_bnb_8bit", optim_args="min_8bit_size=16")
    assert ShardedTrainer.get_optimizer_cls_and_kwargs(args)[1]["min_8bit_size"] == 16
    for given in ("min_8bit_size=16, percentile_clipping=5", "min_8bit_size", "min_8bit_size=1e3"):
        args.optim_args = given
        with pytest.raises(ValueError, match=rf"optim_args is '{given}': .* takes min_8bit_size=NUMBER only"):
            ShardedTrainer.get_optimizer_cls_and_kwargs(args)
