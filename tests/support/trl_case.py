"""GRPO by TRL's own trainer and by ODCGRPOTrainer, on the same completions: what both are given, what a run leaves."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .families import with_lora
from .models import build
from .replicas import mesh_of
from .trainer_case import in_order, samples, weights_of

STEPS = 3
ROWS = 8  # completions of a step
END = 2
MAX_TOKENS = 24


def completion(step: int, index: int) -> list[int]:
    """The tokens of the index-th completion that is sampled at a step: few or many, and some do not end."""
    generator = torch.Generator().manual_seed(100 * step + index)
    length = int(torch.randint(16, MAX_TOKENS, (), generator=generator)) if index % 8 == 5 else 1 + index % 3
    ids = torch.randint(3, 97, (length,), generator=generator).tolist()
    return [*ids, END] if index % 3 else ids


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / len(ids) - len(ids) / 100 for ids in completion_ids]


def sampling_logps(ids: list[int]) -> list[float]:
    """What a sampler says of a completion's tokens. Random weights give each of 97 words about 1/97."""
    return [-4.6 + 0.01 * (token % 7) for token in ids]


class Recorded:
    """In front of either trainer: completions are not sampled but looked up."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], Any]:
        if self.use_vllm:
            self.vllm_generation.sync_weights()
        first = self.accelerator.process_index * len(prompt_ids)
        step = self.state.global_step
        completions = [completion(step, first + i) for i in range(len(prompt_ids))]
        return completions, [sampling_logps(ids) for ids in completions] if self.use_vllm else None


def rollout(prompts: list[str], trainer: Any) -> dict[str, list[list[Any]]]:
    """The same completions from a user's loop, in which an environment wrote every third token."""
    ids, _ = trainer._generate_single_turn(prompts)
    return {
        "prompt_ids": [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [sampling_logps(each) for each in ids],
        "env_mask": [[int(place % 3 != 1) for place in range(len(each))] for each in ids],
    }


def without_vllm() -> None:
    """Completions are recorded, so vLLM is not started: tests/vllm has it."""
    from trl.generation.vllm_generation import VLLMGeneration

    from odc_triton.jobs.trainers.grpo_vllm import ShardedVllmGeneration

    for each in (VLLMGeneration, ShardedVllmGeneration):
        each._init_vllm = each.sync_weights = lambda self: None


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<unknown>": 1, "<end>": END} | {f"w{i}": i for i in range(3, 97)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<pad>")


COMMON = {
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.5,
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
    "use_cpu": True,
}


def arguments(folder: str, rows: int = ROWS, **changes: Any) -> Any:
    """A GRPOConfig; `rows`: completions per rank and step."""
    from trl import GRPOConfig

    wanted = COMMON | {
        "output_dir": folder,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "num_generations": 4,
        "max_completion_length": MAX_TOKENS,
        "learning_rate": 0.1,
        "temperature": 0.8,
    }
    return GRPOConfig(**wanted | changes)


def given(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What both trainers are given besides model and arguments; takes out of `changes` what is not for these."""
    from datasets import Dataset

    before = changes.pop("before", 0) if changes else 0  # tokens that all prompts begin with
    alike = [f"w{3 + i % 90}" for i in range(before)]
    prompts = [
        " ".join(alike + [f"w{3 + (7 * row + i) % 90}" for i in range(before + 1 + 3 * row % 8)]) for row in range(12)
    ]
    streamed = changes.pop("streamed", False) if changes else False
    data = Dataset.from_dict({"prompt": prompts})
    return {
        "reward_funcs": [reward],
        "train_dataset": data.to_iterable_dataset() if streamed else data,
        # Or accelerate drops the last batch of some ranks.
        "eval_dataset": Dataset.from_dict({"prompt": prompts[:ROWS]}),
        "processing_class": tokenizer(),
        "rollout_func": rollout if changes and changes.pop("rollout", False) else None,
    }


def environment() -> None:
    """As under torchrun, for accelerate, which then takes the group that there is; nothing is downloaded or told."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1"}


_OF_QUANTISED = ("is_loaded_in_4bit", "is_loaded_in_8bit", "support_avx512bf16_for_cpu")


def model_of(start: str | None) -> nn.Module:
    """The model, with random weights, or from the folder `start`."""
    from transformers import AutoModelForCausalLM

    if start is None:
        return build("qwen2")
    return AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager")


def plainly(model: nn.Module) -> nn.Module:
    """For TRL's trainers, which would cast a quantised model's adapters; evaluation is not to round its scales."""
    for module in model.modules():
        vars(module).update({name: False for name in _OF_QUANTISED if hasattr(module, name)})
    return model


def adapted(model: nn.Module, lora: str | None) -> nn.Module:
    """The model, with `lora` in PEFT's adapters; "new": B is 0; "ref": and with a copy of them, as TRL adds it."""
    if lora is None:
        return model
    model = with_lora(model)
    for name, value in model.named_parameters() if lora == "new" else ():
        if ".lora_B." in name:
            value.data.zero_()
    if lora == "ref":
        model.add_adapter("ref", model.peft_config["default"])
        own = {name: value for name, value in model.state_dict().items() if ".default." in name}
        model.load_state_dict({name.replace(".default.", ".ref."): own[name] for name in own}, strict=False)
    return model


def packed(model: nn.Module, fused: bool) -> nn.Module:
    from odc_triton import replace_layers
    from odc_triton.hf import enable_packing

    enable_packing(model)
    if fused:
        assert replace_layers(model, roles=["head"], verbose=False).swapped["head"]
    return model


def sharded(start: str | None = None, *, fused: bool = False, lora: str | None = None, **how: Any) -> nn.Module:
    from odc_triton import fully_shard

    return fully_shard(adapted(packed(model_of(start), fused), lora), **how)


def plain_run(rank: int, world: int, folder: str, start: str | None, changes: dict[str, Any]) -> dict[str, Any]:
    """TRL's own trainer, on one process and a whole model."""
    from trl import GRPOTrainer

    class Plain(Recorded, GRPOTrainer):
        pass

    environment()
    without_vllm()
    both, lora = given(changes), changes.pop("lora", None)
    trainer = Plain(plainly(adapted(model_of(start), lora and "base")), args=arguments(folder, **changes), **both)
    if lora == "base" and trainer.beta:
        trainer.model.delete_adapter("ref")  # as if TRL had added the adapters
    start_weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    weights = {name: value.detach() for name, value in trainer.model.named_parameters()}
    return {"logs": trainer.state.log_history, "weights": weights, "start": start_weights}


def sft_run(
    ours: bool, world: int, folder: str, model: nn.Module, changes: dict[str, Any], resume: Any = None, **given: Any
) -> dict[str, Any]:
    """What TRL's SFTTrainer leaves, or ours: a step takes four samples of tests/support/trainer_case.py."""
    import trl
    from datasets import Dataset

    from odc_triton import fully_shard, hf

    environment()
    rows = {"per_device_train_batch_size": 4 // world, "optim": "adamw_torch", "learning_rate": 1e-2}
    order = {} if ours else {"train_sampling_strategy": "sequential"}
    args = trl.SFTConfig(**COMMON | rows | order | {"output_dir": folder} | changes)
    given = {name: Dataset.from_list(data) for name, data in given.items()}
    given |= {"train_dataset": Dataset.from_list(samples() if ours else in_order()), "processing_class": tokenizer()}
    if ours:
        hf.enable_packing(model)
    of, model = (hf.ODCSFTTrainer, fully_shard(model)) if ours else (trl.SFTTrainer, plainly(model))
    trainer = of(model, args, **given)
    trainer.train(resume_from_checkpoint=resume)
    weights = weights_of(model) if ours else {name: value.detach() for name, value in model.named_parameters()}
    return {"logs": trainer.state.log_history, "weights": weights}


def odc_trainer(folder: str, world: int, start: str | None = None, **changes: Any) -> Any:
    """ODCGRPOTrainer on recorded completions; a step has ROWS of them whatever the world."""
    from odc_triton.hf import ODCGRPOTrainer

    class Ours(Recorded, ODCGRPOTrainer):
        pass

    environment()
    own = {name: changes.pop(name) for name in ("token_cap", "share_prefixes") if name in changes}
    how = {name: changes.pop(name) for name in ("fused", "exact", "mp_policy", "lora") if name in changes}
    if replicas := changes.pop("replicas", None):
        how["mesh"] = mesh_of((replicas, world // replicas))
    both = given(changes) | own
    return Ours(sharded(start, **how), args=arguments(folder, ROWS // world, **changes), **both)


def odc_run(
    rank: int, world: int, folder: str, start: str | None, changes: dict[str, Any], resume: str | None = None
) -> dict[str, Any]:
    from odc_triton.engine.api import engine_of
    from odc_triton.jobs.trainers.grpo_rows import row_tokens
    from odc_triton.nn.operand import is_sharded

    without_vllm()
    trainer = odc_trainer(folder, world, start, **changes)
    assigned, assign = [], trainer._assign
    trainer._assign = lambda rows: assigned.append(assign(rows)) or assigned[-1]
    forwards: dict[bool, list[int]] = {True: [], False: []}  # in minibatches, and outside: the tokens of each
    engine = engine_of(trainer.model)
    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.register_forward_pre_hook(
            lambda _, args, given: forwards[engine.is_open].append(given["input_ids"].numel()), with_kwargs=True
        )
    trainer.train(resume_from_checkpoint=resume)
    if trainer.ref_model is not None:
        assert is_sharded(trainer.ref_model)
        assert not trainer.ref_model.training  # no dropout
    return {
        "logs": trainer.state.log_history,
        "weights": weights_of(trainer.model),
        "reference": trainer.ref_model and weights_of(trainer.ref_model),
        "rows": [sum(map(len, each.packs)) for each in assigned],
        "packs": [len(each.packs) for each in assigned],
        "forwards": len(forwards[True]),
        "tokens": [sum(row_tokens(row) for pack in each.packs for row in pack) for each in assigned],
        "computed": sum(forwards[True]),
        "computed_outside": sum(forwards[False]),
    }


# Times; and means that TRL takes over ranks, whatever their numbers of tokens.
_UNTOLD = ("step_time", "runtime", "per_second", "logp_difference/mean", "sampling_ratio/mean")


def assert_alike(
    results: list[dict[str, Any]], plain: dict[str, Any], *, tolerance: float = 1e-5, batches: int = 1
) -> None:
    """The same losses, metrics and weights; sums come in another order, in packs and over ranks.

    With several `batches` in a step TRL's metrics of tokens are means of the batches' means: not compared.
    """
    by_tokens = ("entropy", "kl", *(f"clip_ratio/{end}" for end in ("low_mean", "low_min", "high_mean", "high_max")))
    by_tokens += ("clip_ratio/region_mean",)
    untold = _UNTOLD + (by_tokens if batches > 1 else ())
    for result in results:
        assert len(result["logs"]) == len(plain["logs"])
        for got, want in zip(result["logs"], plain["logs"], strict=True):
            assert got.keys() == want.keys()
            for name, value in want.items():
                if value is None:
                    assert got[name] is None, name
                elif not name.endswith(untold):
                    # A loss may be a small difference of its terms, which are about 1.
                    assert abs(got[name] - value) <= tolerance * max(abs(value), 1), (name, got[name], value)
        assert result["weights"].keys() == plain["weights"].keys()
        whole, moved, error = (
            _norm(value - other[name] for name, value in plain["weights"].items())
            for other in (dict.fromkeys(plain["weights"], 0.0), plain["start"], result["weights"])
        )
        assert moved > 1e-3 * whole
        # Weights are rounded at every step, to 6e-8 of themselves.
        assert error <= tolerance * moved + 1e-7 * whole


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.double().pow(2).sum() for tensor in tensors) ** 0.5)
