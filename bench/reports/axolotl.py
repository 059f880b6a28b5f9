"""What stops each of axolotl's example configurations here: `python -m bench.reports.axolotl CHECKOUT COMMIT`.

A configuration is *expressed* if nothing stops it: by a command, a trainer, or a loop with `fully_shard`. Uncertain is
stopped: an unknown key or plugin, a base whose family no test trains. Nothing is run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bench.provenance import RESULTS, save_json

PLAIN = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit", "sgd", "muon")  # pages are a place, not a rule
EIGHT_BITS = ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_8bit", "paged_adamw_8bit")
# docs/models.md and docs/images.md, as the hub names them.
TEXT = (
    r"llama[-_]?[237]|llama_3b|tinyllama|codellama|smollm2|mistral-(7b|nemo)|ministral-8b|magistral-small-250[67]|mixtral|"
    r"qwen(1\.5|2|3)|gemma|phi-?[1234]|olmo|granite|smollm3|aya|command|glm-4|stablelm|starcoder|seed-oss|exaone-?4|ernie|"
    r"nemotron|gpt2|cerebras-gpt|redpajama-incite|pythia|gpt-oss|deepseek-v[23]|falcon-h1|lfm2|kimi-linear"
)
VISION = r"qwen(2|2\.5|3)-vl|qwen3\.[56]|gemma-?3-|idefics3|smolvlm|llava"
PLUGINS = "cut_cross_entropy|liger|kernels|swanlab"  # faster operators, and a tracker

SOLVED: dict[str, Callable[[dict[str, Any]], Any]] = {  # by packed bases and 8-bit states
    "a base in 4 bits": lambda c: c.get("load_in_4bit"),
    "a base in 8 bits": lambda c: c.get("load_in_8bit"),
    "an optimizer in 8 bits": lambda c: c.get("optimizer") in EIGHT_BITS,
}
RULES = {
    "another optimizer": lambda c: c.get("optimizer", PLAIN[0]) not in PLAIN + EIGHT_BITS,
    "another kind of adapter": lambda c: c.get("adapter") not in (None, "lora", "qlora") or c.get("relora"),
    "another kind of RL": lambda c: c.get("rl") not in (None, "dpo", "orpo", "grpo"),
    "another format of weights": lambda c: (
        any(c.get(key) for key in ("model_quantization_config", "gptq", "qat", "fp8"))
        or re.search(r"fp8|nvfp4|gptq|awq|prequantized", c["base_model"].lower())
    ),
    "tensor, context or expert parallelism": lambda c: any(
        (c.get(f"{kind}_parallel_size") or 1) > 1 for kind in ("tensor", "context", "expert")
    ),
    "offloaded parameters": lambda c: (
        re.search(r"offload_params': True", str(c.get("fsdp_config"))) or "offload" in str(c.get("deepspeed"))
    ),
    "fp16": lambda c: c.get("fp16") or c.get("float16"),
    "a family without a test": lambda c: (
        not re.search(VISION if c.get("processor_type") else TEXT, c["base_model"].lower())
    ),
    "a plugin": lambda c: [each for each in c.get("plugins") or [] if not re.search(PLUGINS, each)],
}
# Keys of the rules above; of data, schedules, output, faster operators, and memory that other options save here.
KNOWN = re.compile(
    r"load_in_|optimizer|adapter|rl$|model_quantization|gptq$|qat$|fp8$|(tensor|context|expert)_parallel_size|fsdp|deepspeed|"
    r"fp16|float16|base_model$|processor_type|plugins|bnb_config|quantize_moe|relora$|adam_|auto_resume|batch_size|bf16|bfloat16|"
    r"chat_template|cosine|cut_cross|dataset|ddp|debug|dp_|early_stop|eot_tokens|eta_min|eval|experts_impl|flash|flex_attn|"
    r"fused_attn|gradient|group_by|hf_use|hub_|learning_rate|liger|logging|loss_watchdog|lora_|lr_sched|low_cpu|max_|"
    r"micro_batch|min_sample|model_type|num_|orpo_alpha|output_dir|pad_to|peft_use_rslora|pretrain|reward_model|revision|"
    r"rl_beta|sample_packing|save|seed|sequence_len|shuffle|skip_prepare|special_tokens|swanlab|test_|tf32|tiled_mlp|tokenizer|"
    r"tokens|torch_|train_on|trl$|trust_remote|unfrozen|use_(kernels|tensorboard|swanlab|scattermoe|sonicmoe)|val_set|vllm|"
    r"wandb|warmup|weight_decay|activation_off|attn_impl|device_map|center_rewards"
)


def stops(config: dict[str, Any]) -> list[str]:
    unknown = sorted(key for key, value in config.items() if value and not KNOWN.match(key))
    return [reason for reason, holds in (SOLVED | RULES).items() if holds(config)] + [
        f"the key {key}" for key in unknown
    ]


def total(reasons: list[list[str]]) -> dict[str, Any]:
    alone = Counter(each[0] for each in reasons if len(each) == 1)
    stopped = Counter(each for found in reasons for each in found)
    counts = {"stopped": dict(stopped.most_common()), "by_it_alone": dict(alone.most_common())}
    return {"expressed": sum(not each for each in reasons), **counts}


if __name__ == "__main__":
    folder = Path(sys.argv[1], "examples")
    read = {str(path.relative_to(folder)): yaml.safe_load(path.read_text()) for path in sorted(folder.rglob("*.y*ml"))}
    files = {name: stops(each) for name, each in read.items() if each.get("base_model")}  # others start machines
    left = [[reason for reason in each if reason not in SOLVED] for each in files.values()]
    totals = {"configurations": len(files), "before": total([*files.values()]), "after": total(left)}
    save_json(RESULTS / "axolotl.json", {"commit_of_axolotl": sys.argv[2], "totals": totals, "files": files})
    print(totals)
