"""What to write in place of an option that there is not: what TRL, transformers, axolotl and others call it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

Value = TypeVar("Value")

_PER_RANK = "samples_per_rank prompts_per_rank pairs_per_rank"
# What others call an option: options here, of which the first counts that the command has, and what else to know.
_NAMES: dict[str, tuple[str, str]] = {
    "output_dir save_dir": ("out", ""),
    "learning_rate max_lr": ("lr", ""),
    "model_name_or_path model_name base_model model_id": ("model", ""),
    "dataset_name dataset datasets train_file train_files": ("data", ""),
    "eval_dataset validation_file": ("eval_data", ""),
    "val_set_size": ("eval_fraction", ", a fraction"),
    "batch_size micro_batch_size train_batch_size per_device_train_batch_size gradient_accumulation_steps": (
        _PER_RANK,
        ", of a step: the product of batch size and accumulation",
    ),
    "max_steps": ("steps", ""),
    "num_train_epochs num_epochs": ("epochs steps", ""),
    "max_seq_length max_seq_len max_length sequence_len cutoff_len model_max_length": (
        "token_cap",
        ", of a pack; see --truncate",
    ),
    "max_completion_length max_response_length": ("max_new_tokens", ""),
    "eval_steps eval_strategy": ("eval_every", ", in steps"),
    "save_steps save_strategy save_freq": ("checkpoint_every", ", in steps"),
    "save_total_limit": ("keep", ""),
    "resume_from_checkpoint": ("resume", ""),
    "lr_scheduler_type lr_scheduler": ("schedule", ""),
    "warmup_ratio": ("warmup_steps", ", in steps, not as a ratio"),
    "max_grad_norm gradient_clipping": ("clip_norm", ""),
    "optim": ("optimizer", ""),
    "lora_r use_peft adapter": ("lora_rank", ", a number; without it all is trained"),
    "load_in_4bit": ("quantize", " nf4"),
    "load_in_8bit": ("quantize", " int8"),
    "finetuning_type": ("lora_rank", ", for LoRA; without it all is trained"),
    "lora_target_modules lora_target": ("lora_targets", ""),
    "bf16 fp16 torch_dtype mixed_precision": ("dtype", ", fp32 or bf16"),
    "num_generations": ("generations", ""),
    "beta": ("kl", ""),
    "epsilon": ("clip", ""),
    "loss_type": ("loss", ""),
    "reward_funcs": ("reward", ""),
    "vllm_mode use_vllm": ("engine", ", vllm-server or vllm-colocate"),
    "wandb_project": ("project", ""),
    "hub_model_id": ("push_to_hub", ", with the id"),
    "hub_private_repo": ("hub_private", ""),
    "use_liger_kernel": ("fused_head", ""),
    "ddp_timeout": ("timeout_minutes", ""),
    "num_processes nproc_per_node num_gpus n_gpus_per_node": ("ranks", ""),
}
_NONE = {
    "packing sample_packing padding_free": "samples are always packed, up to --token-cap",
    "logging_steps logging_strategy": "every step is logged",
    "fsdp fsdp_config deepspeed": "everything is always sharded",
    "attn_implementation flash_attn flash_attention use_flash_attention_2": "attention is that of packs",
    "lora_dropout": "LoRA has no dropout",
    "completion_only_loss assistant_only_loss": "completions alone are learned where the data have prompts",
}


def by_another_name(word: str, names: Collection[str]) -> str:
    """Which of the options `names` others call `word`: text that goes on a message, empty if none."""
    plain, written = _plain(word), {_plain(each): each for each in names}
    options, note = _of(plain, _NAMES) or ("", "")
    here = next((option for option in options.split() if option in written), None)
    return "" if here is None else f"; {word} is {written[here]} here{note}"


def instead(word: str, names: Collection[str]) -> str:
    """What to write for `word`, which is none of the options `names`: text that goes on a message, maybe empty."""
    if found := by_another_name(word, names):
        return found
    plain, written = _plain(word), {_plain(each): each for each in names}
    if why := _of(plain, _NONE):
        return f"; there is no {word} here: {why}"
    close = difflib.get_close_matches(plain, written, n=1)
    return f"; did you mean {written[close[0]]}?" if close else ""


def _of(word: str, table: Mapping[str, Value]) -> Value | None:
    """The value of the key that has the word."""
    return next((value for words, value in table.items() if word in words.split()), None)


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
