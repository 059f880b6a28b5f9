"""transformers' Trainer: trainer.py --model FOLDER [--own_fsdp2] and its own options."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig


@dataclass
class ScriptArguments:
    model: str
    own_fsdp2: bool = False  # transformers', not accelerate's


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (longest - len(row)) for row in rows]),
    }


script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(0)
model = AutoModelForCausalLM.from_pretrained(
    script.model, distributed_config=DistributedConfig(fsdp_size=2) if script.own_fsdp2 else None
)
generator = torch.Generator().manual_seed(1)
lengths = torch.randint(8, 64, (96,), generator=generator).tolist()
data = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]
trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:16], data_collator=collate)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
