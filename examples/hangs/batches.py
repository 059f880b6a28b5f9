"""Rank 0 has three batches in a step and rank 1 has two."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    for batch in range(3 - rank):
        model(torch.full((4, 8), batch + step + 1.0)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    norm = norm.full_tensor()
    print(f"rank {rank}, step {step}: {3 - rank} batches, gradient norm {norm:.4f}", flush=True)
dist.destroy_process_group()
