"""transformers' Trainer: python trainer.py OPTIMIZER OUT."""

import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
optimizer, out = sys.argv[1:]
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))
generator = torch.Generator().manual_seed(1)
lengths = torch.randint(8, 64, (96,), generator=generator).tolist()
data = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    pads = [longest - len(row) for row in rows]
    return {
        "input_ids": torch.tensor([row + [0] * pad for row, pad in zip(rows, pads, strict=True)]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * pad for row, pad in zip(rows, pads, strict=True)]),
        "labels": torch.tensor([row + [-100] * pad for row, pad in zip(rows, pads, strict=True)]),
    }


args = TrainingArguments(
    output_dir=out,
    optim=optimizer,
    learning_rate=1e-2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    max_steps=6,
    eval_strategy="steps",
    eval_steps=3,
    per_device_eval_batch_size=2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    remove_unused_columns=False,
)
trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:16], data_collator=collate)
trainer.train()
trainer.save_model()
