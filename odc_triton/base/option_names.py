"""What to write in place of an option that there is not: what TRL, transformers, axolotl and others call it."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# Options here, of which the first counts that the command has, and their names elsewhere.
_NAMES = """
out: output_dir save_dir | lr: learning_rate max_lr | model: model_name_or_path model_name base_model model_id
data: dataset_name dataset datasets train_file | eval_data: eval_dataset validation_file | eval_fraction: val_set_size
samples_per_rank prompts_per_rank: batch_size per_device_train_batch_size micro_batch_size train_batch_size
samples_per_rank prompts_per_rank: gradient_accumulation_steps | steps: max_steps | epochs steps: num_train_epochs
epochs steps: num_epochs | token_cap: max_length max_seq_length max_seq_len sequence_len cutoff_len model_max_length
max_new_tokens: max_completion_length max_response_length | eval_every: eval_steps eval_strategy
checkpoint_every: save_steps save_strategy save_freq | keep: save_total_limit | resume: resume_from_checkpoint
schedule: lr_scheduler_type lr_scheduler | warmup_steps: warmup_ratio | clip_norm: max_grad_norm gradient_clipping
optimizer: optim | lora_rank: use_peft adapter lora_r finetuning_type | lora_targets: lora_target_modules lora_target
dtype: bf16 fp16 torch_dtype mixed_precision | generations: num_generations | kl: beta | clip: epsilon | loss: loss_type
reward: reward_funcs | engine: use_vllm | project: wandb_project | ranks: num_processes nproc_per_node num_gpus
"""
_NOTES = {"dtype": "bf16", "lora_rank": "N", "samples_per_rank": "N (per step)", "prompts_per_rank": "N (per step)"}
_NONE = {
    "samples are always packed, up to --token-cap": "packing sample_packing padding_free",
    "every step is logged": "logging_steps logging_strategy",
    "weights are not quantised; --lora-rank with --dtype bf16 needs the least memory": "load_in_4bit load_in_8bit",
    "everything is always sharded": "fsdp fsdp_config deepspeed",
    "attention is that of packs": "attn_implementation flash_attn flash_attention use_flash_attention_2",
}


def instead(word: str, names: Collection[str]) -> str:
    """What to write for `word`, which is none of the options `names`: text that goes on a message, maybe empty."""
    plain, *others = (each.lstrip("-").replace("-", "_") for each in (word, *names))
    written = dict(zip(others, names, strict=True))
    for options, _, known in (entry.partition(":") for entry in _NAMES.replace("|", "\n").splitlines()):
        here = next((option for option in options.split() if option in written), None)
        if here and plain in known.split():
            return f"; {word} is {' '.join(filter(None, (written[here], _NOTES.get(here))))} here"
    if why := next((why for why, known in _NONE.items() if plain in known.split()), None):
        return f"; there is no {word} here: {why}"
    close = difflib.get_close_matches(plain, written, n=1)
    return f"; did you mean {written[close[0]]}?" if close else ""
