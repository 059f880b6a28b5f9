"""Saves a small random Qwen2 with the tokenizer of a GGUF file: small_qwen2.py FILE FOLDER."""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

file, folder = Path(sys.argv[1]), sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
torch.manual_seed(0)
config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)  # not all alike
Qwen2ForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
