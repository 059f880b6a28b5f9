"""Rank 0 generates five tokens and rank 1 two, then both train on what they have."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.tensor([[1, 2, 3]])
with torch.no_grad():
    for _ in range(5 - 3 * rank):  # until this rank's answer is complete
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
model(ids, labels=ids).loss.backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(f"rank {rank}: gradient norm {norm.full_tensor():.4f}", flush=True)
dist.destroy_process_group()
