"""Layers that read weights from their owners. Runs as is, or: torchrun --nproc-per-node 2 THIS_FILE"""

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import fully_shard, minibatch, replace_layers, verify

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
ids = torch.randint(0, 256, (1, 60))

replace_layers(model, roles=("linear", "embedding", "attention", "head"))  # before fully_shard
verify(model, {"input_ids": ids, "labels": ids})  # loss and every gradient, against the model's own layers
model = fully_shard(model)

with minibatch(model, tokens=ids.numel() - 1) as mb:
    loss = model(input_ids=ids.to(model.device), labels=ids.to(model.device), use_cache=False).loss
    (loss * (ids.numel() - 1) / mb.tokens).backward()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
