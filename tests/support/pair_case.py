"""DPO and reward models by TRL's own trainers and by ours, on the same pairs: what both are given, what runs leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .families import causal_lm, with_lora
from .trainer_case import weights_of
from .trl_case import COMMON, adapted, environment, model_of, packed, plainly, tokenizer

PAIRS = 18
ROWS = 6  # pairs of a step
SEED = 42
_MODEL = ("exact", "backend", "mp_policy")  # options of fully_shard
_OURS = ("share_prefixes", "dataloader_num_workers")
_CASE = ("lora", "fused", "other", "columns", "evals")


def pair(index: int) -> dict[str, str]:
    """Prompts of few or of many words, of which some begin alike, and completions of few or many."""
    words = [f"w{3 + (7 * index + at) % 90}" for at in range(3 + 11 * index % 13)]
    prompt = [f"w{3 + at}" for at in range(40 if index % 3 else 0)] + words
    chosen, rejected = (
        [f"w{3 + (5 * index + step * at) % 90}" for at in range(1 + (times * index) % 23)]
        for step, times in ((3, 9), (4, 5))
    )
    return {"prompt": " ".join(prompt) + " ", "chosen": " ".join(chosen), "rejected": " ".join(rejected)}


def dataset(order: list[int], columns: dict[str, list[Any]] | None = None) -> Any:
    from datasets import Dataset

    pairs = Dataset.from_list([pair(index) for index in order])
    for name, values in (columns or {}).items():
        pairs = pairs.add_column(name, [values[index] for index in order])
    return pairs


def in_order() -> list[int]:
    """The pairs in the order of our trainers' steps."""
    from odc_triton.balance import MinibatchSampler

    sampler = MinibatchSampler([1] * PAIRS, ROWS, 1, seed=SEED, rank=0, world=1)
    return [index for packs in sampler for pack in packs for index in pack]


def arguments(kind: str, folder: str, rows: int = ROWS, **changes: Any) -> Any:
    """`rows`: pairs per rank and step."""
    import trl

    wanted = COMMON | {
        "output_dir": folder,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": PAIRS,  # TRL's metrics of an evaluation are means of batches
        "learning_rate": 0.05,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    return getattr(trl, f"{kind}Config")(**wanted | changes)


def save_classifier(folder: str, family: str = "Qwen2") -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = causal_lm(family).config
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def model_for(kind: str, start: str | None, lora: str | None = None) -> nn.Module:
    if kind == "DPO":
        return adapted(model_of(start), lora)
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(start, attn_implementation="eager")
    how = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    return model if lora is None else with_lora(model, ("q_proj", "up_proj"), **how)


def sharded(kind: str, start: str | None, lora: str | None = None, fused: bool = False, **how: Any) -> nn.Module:
    from odc_triton import fully_shard

    return fully_shard(packed(model_for(kind, start, lora), fused), **how)


def trainer_of(kind: str, ours: bool, world: int, folder: str, start: str | None, changes: dict[str, Any]) -> Any:
    """TRL's own trainer, on one process and whole models, or ours. `start`: the model's folder; `other`: that of a
    reference; `columns`: of the data. Where these are the reference's, TRL reads `other` itself.
    """
    import trl

    from odc_triton import hf
    from tests.support import simulated  # noqa: F401 a backend

    environment()
    how, own, made = ({name: changes[name] for name in names if name in changes} for names in (_MODEL, _OURS, _CASE))
    args = {name: value for name, value in changes.items() if name not in (*_MODEL, *_OURS, *_CASE)}
    columns, other, lora = made.get("columns", {}), made.get("other"), made.get("lora")
    if "ref_chosen_logps" in columns:
        columns, other = (columns, None) if ours else ({}, other)
    if ours:
        model = sharded(kind, start, lora, made.get("fused", False), **how)
        args |= {name: own.pop(name) for name in ("dataloader_num_workers",) if name in own}
        args |= {name: args[name] // world for name in ("per_device_train_batch_size",) if name in args}
    else:
        model, own = plainly(model_for(kind, start, lora)), {}
        if lora == "ref":
            model.delete_adapter("ref")  # TRL adds it
        args |= {"train_sampling_strategy": "sequential"}
        if kind == "DPO":  # else TRL 1.15's reference attends by another implementation than its policy
            args["model_init_kwargs"] = {"attn_implementation": model.config._attn_implementation}
    if other is not None:
        own["ref_model"] = sharded(kind, other) if ours else model_of(other)
    held_out = dataset([*range(PAIRS)], columns)
    trainer = getattr(hf if ours else trl, f"{'ODC' if ours else ''}{kind}Trainer")
    return trainer(
        model,
        args=arguments(kind, folder, **{"rows": ROWS // world} | args),
        train_dataset=held_out if ours else dataset(in_order(), columns),
        eval_dataset={"a": held_out, "b": held_out.select(range(4))} if "evals" in made else held_out,
        processing_class=tokenizer(),
        **own,
    )


def run(
    kind: str, ours: bool, world: int, folder: str, start: str, changes: dict[str, Any], resume: str | None = None
) -> dict[str, Any]:
    """What a run leaves. Logs are without FLOPs, which both count with padding, of other batches."""
    trainer = trainer_of(kind, ours, world, folder, start, changes)
    computed: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )

    weights = weights_of if ours else lambda model: {name: p.detach().clone() for name, p in model.named_parameters()}
    before = weights(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    after = weights(trainer.model)
    assert all(after.pop(name).equal(before[name]) for name in before if ".ref." in name)
    logs = [{name: each[name] for name in each if name != "total_flos"} for each in trainer.state.log_history]
    found = {"logs": logs, "weights": after, "start": before, "computed": sum(computed)}
    return found | {"reference": getattr(trainer, "ref_model", None) is not None}
