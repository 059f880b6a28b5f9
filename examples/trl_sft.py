"""TRL's supervised fine-tuning on odc-triton: torchrun --nproc-per-node 2 examples/trl_sft.py

TRL prepares the data (templates, prompts that are not learned, truncation) and keeps its configuration; ODCTrainer
assigns the samples, packs them and takes the step. So TRL's own packing stays off.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig

from odc_triton import fully_shard
from odc_triton.hf import ODCSFTTrainer, enable_packing


def main(out: str) -> None:
    words = [str(number) for number in range(100)] + [word for line in __doc__.split("\n") for word in line.split()]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["<end>", "<unknown>", *words]))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    lines = [
        {"prompt": f"{start} ", "completion": " ".join(str((start + i) % 100) for i in range(1, 3 + start % 17))}
        for start in range(64)
    ]
    folder = Path(out) / f"data-{os.environ['RANK']}"  # each rank its own: they all write
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = Dataset.from_json(str(folder / "train.jsonl"), cache_dir=str(folder))

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(vocabulary), **sizes, num_key_value_heads=2))
    enable_packing(model)
    model = fully_shard(model)
    args = SFTConfig(
        output_dir=out,
        per_device_train_batch_size=16 // dist.get_world_size(),  # samples per rank and step
        max_steps=12,
        learning_rate=3e-3,
        max_length=128,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,  # give fully_shard an mp_policy instead
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ODCSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}; the model is in {Path(out).resolve()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out/trl_sft")
