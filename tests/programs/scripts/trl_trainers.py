"""TRL's trainers: trl_trainers.py --model FOLDER --method sft|dpo|grpo and options that they share with Trainer."""

from dataclasses import dataclass
from typing import Literal

import torch
from datasets import Dataset
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    model: str
    method: Literal["sft", "dpo", "grpo"]


def texts(seed: int, longest: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (64,), generator=generator).tolist()
    return [" ".join(f"w{n}" for n in torch.randint(3, 97, (size,), generator=generator)) for size in lengths]


def odd_words(completions: list[str], **_) -> list[float]:
    return [sum(int(word[1:]) % 2 for word in text.split() if word[1:].isdigit()) / 8 for text in completions]


script, rest = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(return_remaining_strings=True)[:2]
config = {"sft": SFTConfig, "dpo": DPOConfig, "grpo": GRPOConfig}[script.method]
(args,) = HfArgumentParser(config).parse_args_into_dataclasses(rest)
if script.method == "sft":
    data = Dataset.from_dict({"text": texts(1, 40)})
    trainer = SFTTrainer(script.model, args, train_dataset=data)
elif script.method == "dpo":
    data = Dataset.from_dict({"prompt": texts(1, 8), "chosen": texts(2, 30), "rejected": texts(3, 30)})
    trainer = DPOTrainer(script.model, args=args, train_dataset=data)
else:
    data = Dataset.from_dict({"prompt": texts(1, 8)})
    trainer = GRPOTrainer(script.model, odd_words, args, train_dataset=data)
trainer.train()
trainer.save_model()
