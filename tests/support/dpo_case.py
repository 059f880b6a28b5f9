"""DPO by TRL's own trainer and by ODCDPOTrainer, on the same pairs: what both are given, what a run leaves."""

from __future__ import annotations

from typing import Any

from torch import nn

from .families import with_lora
from .trainer_case import weights_of
from .trl_case import environment, model_of, tokenizer

PAIRS = 18
ROWS = 6  # pairs of a step
STEPS = 3
SEED = 42


def pair(index: int) -> dict[str, str]:
    """Prompts of few or of many words, of which some begin alike, and completions of few or many."""
    words = [f"w{3 + (7 * index + at) % 90}" for at in range(3 + 11 * index % 13)]
    prompt = [f"w{3 + at}" for at in range(40 if index % 3 else 0)] + words
    chosen, rejected = (
        [f"w{3 + (5 * index + step * at) % 90}" for at in range(1 + (times * index) % 23)]
        for step, times in ((3, 9), (4, 5))
    )
    return {"prompt": " ".join(prompt) + " ", "chosen": " ".join(chosen), "rejected": " ".join(rejected)}


def dataset(order: list[int], **columns: Any) -> Any:
    from datasets import Dataset

    given = {name: [values[index] for index in order] for name, values in columns.items()}
    pairs = Dataset.from_list([pair(index) for index in order])
    for name, values in given.items():
        pairs = pairs.add_column(name, values)
    return pairs


def in_order() -> list[int]:
    """The pairs in the order of ODCDPOTrainer's steps."""
    from odc_triton.balance import MinibatchSampler

    sampler = MinibatchSampler([1] * PAIRS, ROWS, 1, seed=SEED, rank=0, world=1)
    return [index for packs in sampler for pack in packs for index in pack]


def arguments(folder: str, rows: int = ROWS, kind: str = "DPOConfig", **changes: Any) -> Any:
    """`rows`: pairs per rank and step."""
    import trl

    wanted = {
        "output_dir": folder,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": PAIRS,  # TRL's metrics of an evaluation are means of batches
        "max_steps": STEPS,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
    }
    return getattr(trl, kind)(**wanted | changes)


def adapted(model: nn.Module, lora: str | None) -> nn.Module:
    """The model, with `lora` in PEFT's adapters: "new" ones, or "ref", trained ones and a copy."""
    if lora is None:
        return model
    model = with_lora(model)
    if lora == "new":
        for name, value in model.named_parameters():
            if ".lora_B." in name:
                value.data.zero_()
    else:
        model.add_adapter("ref", model.peft_config["default"])
        own = {name: value for name, value in model.state_dict().items() if ".default." in name}
        model.load_state_dict({name.replace(".default.", ".ref."): own[name] for name in own}, strict=False)
    return model


def sharded(start: str | None, *, fused: bool = False, lora: str | None = None, **how: Any) -> nn.Module:
    from odc_triton import fully_shard, replace_layers
    from odc_triton.hf import enable_packing

    model = model_of(start)
    enable_packing(model)
    if fused:
        assert replace_layers(model, roles=["head"], verbose=False).swapped["head"]
    return fully_shard(adapted(model, lora), **how)


def logs_of(trainer: Any) -> list[dict[str, Any]]:
    """Without the FLOPs, which both count with padding, of other batches."""
    return [
        {name: value for name, value in entry.items() if name != "total_flos"} for entry in trainer.state.log_history
    ]


def plain_run(rank: int, world: int, folder: str, start: str, changes: dict[str, Any]) -> dict[str, Any]:
    """TRL's own trainer, on one process and whole models; `other`: the reference's folder."""
    from trl import DPOTrainer

    environment()
    changes = dict(changes)
    lora, other, evals = changes.pop("lora", None), changes.pop("other", None), changes.pop("evals", False)
    model = adapted(model_of(start), lora)
    if lora == "ref":
        model.delete_adapter("ref")  # TRL adds it
    args = arguments(folder, train_sampling_strategy="sequential", **changes)
    held_out = dataset([*range(PAIRS)])
    trainer = DPOTrainer(
        model,
        model_of(other) if other else None,
        args,
        train_dataset=dataset(in_order()),
        eval_dataset={"a": held_out, "b": held_out.select(range(4))} if evals else held_out,
        processing_class=tokenizer(),
    )
    begin = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    weights = {name: value.detach() for name, value in trainer.model.named_parameters() if ".ref." not in name}
    return {"logs": logs_of(trainer), "weights": weights, "start": begin}


def odc_trainer(folder: str, world: int, start: str | None, **changes: Any) -> Any:
    from odc_triton.hf import ODCDPOTrainer

    environment()
    how = {name: changes.pop(name) for name in ("fused", "exact", "mp_policy", "lora") if name in changes}
    own = {name: changes.pop(name) for name in ("share_prefixes",) if name in changes}
    other, columns, evals = changes.pop("other", None), changes.pop("columns", {}), changes.pop("evals", False)
    held_out = dataset([*range(PAIRS)], **columns)
    return ODCDPOTrainer(
        sharded(start, **how),
        sharded(other) if other else None,
        arguments(folder, **{"rows": ROWS // world} | changes),
        train_dataset=dataset([*range(PAIRS)], **columns),
        eval_dataset={"a": held_out, "b": held_out.select(range(4))} if evals else held_out,
        processing_class=tokenizer(),
        **own,
    )


def odc_run(
    rank: int, world: int, folder: str, start: str, changes: dict[str, Any], resume: str | None = None
) -> dict[str, Any]:
    trainer = odc_trainer(folder, world, start, **changes)
    computed: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    before = weights_of(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    weights = weights_of(trainer.model)
    assert all(weights.pop(name).equal(before[name]) for name in before if ".ref." in name)
    return {
        "logs": logs_of(trainer),
        "weights": weights,
        "computed": sum(computed),
        "reference": trainer.ref_model is not None,
        "minibatches": trainer.state.global_step,
    }
