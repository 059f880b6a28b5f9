"""A small model and chats for it, as files: what programs for fine-tuning are given; how close their results are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from tests.support.chats import CHATML, make_tokenizer
from tests.support.families import causal_lm

STEPS = 6
CHATS = STEPS * 2 * 4 * 2  # steps, ranks, microbatches, chats in each
WITHIN = {"sgd": 1e-7, "adamw_torch": 1e-5}  # for the reasons that test_transformers.py gives


def write_chats(folder: Path) -> Path:
    """Writes model/ and chats.jsonl, and what LLaMA-Factory says of them in dataset_info.json; returns the folder."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.eos_token, tokenizer.unk_token = "<|im_end|>", tokenizer.pad_token  # none that programs would add
    torch.manual_seed(0)
    model = causal_lm("Qwen2", attention=None, vocab_size=len(tokenizer), max_position_embeddings=256)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    numbers, words = random.Random(0), ("the", "user", "asks", "and", "the", "assistant", "says", "yes", "no", "again")
    chats = []
    for _ in range(CHATS):
        said = " ".join(numbers.choices(words, k=numbers.randint(1, 20)))
        chats.append([{"role": "user", "content": f"again: {said}"}, {"role": "assistant", "content": said}])
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    described = {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": described | {"tags": tags}}))
    return folder
