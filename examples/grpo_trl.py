"""TRL's GRPO on odc-triton: torchrun --nproc-per-node 2 examples/grpo_trl.py

A tiny model with random weights learns to answer in even numbers. TRL samples, scores and logs; ODCGRPOTrainer assigns
all ranks' completions by length, and packs them without padding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

from odc_triton import fully_shard
from odc_triton.hf import ODCGRPOTrainer, enable_packing


def even_numbers(completions: list[str], **columns: object) -> list[float]:
    """The part of a completion's words that are even numbers."""
    words = [completion.split() for completion in completions]
    return [sum(word[-1] in "02468" for word in each) / max(len(each), 1) for each in words]


def main(out: str) -> None:
    vocabulary = {word: index for index, word in enumerate(["<end>", "<unknown>", *map(str, range(62))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    prompts = Dataset.from_dict({"prompt": [f"{number} {number + 1}" for number in range(60)]})

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(vocabulary), **sizes, num_key_value_heads=2))
    enable_packing(model)
    model = fully_shard(model)
    args = GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=64 // dist.get_world_size(),  # completions per rank and step
        num_generations=8,
        max_completion_length=24,
        max_steps=12,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,  # TRL's default is True: give fully_shard an mp_policy instead
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ODCGRPOTrainer(model, even_numbers, args, train_dataset=prompts, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if dist.get_rank() == 0:
        print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; the model is in {Path(out).resolve()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out/grpo_trl")
