"""TRL's DPO on odc-triton: torchrun --nproc-per-node 2 examples/trl_dpo.py

A tiny model with random weights learns to prefer counting up to counting down. TRL prepares the pairs and logs;
ODCDPOTrainer assigns them by cost, computes a pair's prompt once, and reads the reference from the ranks' shards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig

from odc_triton import fully_shard
from odc_triton.hf import ODCDPOTrainer, enable_packing


def pair(start: int) -> dict[str, str]:
    """Some words of a prompt, and a few that go on from these or back."""
    prompt, count = range(start, start + 40), 2 + start % 9
    up, down = range(start + 40, start + 40 + count), range(start + 38, start + 38 - count, -1)
    prompt, chosen, rejected = (" ".join(str(number % 100) for number in each) for each in (prompt, up, down))
    return {"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected}


def main(out: str) -> None:
    vocabulary = {word: index for index, word in enumerate(["<end>", "<unknown>", *map(str, range(100))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    pairs = Dataset.from_list([pair(start) for start in range(96)])

    start = Path(out) / f"start-{os.environ['RANK']}"  # each rank its own: the reference is loaded from it
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(vocabulary), **sizes, num_key_value_heads=2)).save_pretrained(start)
    model = Qwen2ForCausalLM.from_pretrained(start, dtype=torch.float32)
    enable_packing(model)
    model = fully_shard(model)
    args = DPOConfig(
        output_dir=out,
        per_device_train_batch_size=16 // dist.get_world_size(),  # pairs per rank and step
        max_steps=12,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,  # TRL's default is True: give fully_shard an mp_policy instead
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ODCDPOTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}; the model is in {Path(out).resolve()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out/trl_dpo")
