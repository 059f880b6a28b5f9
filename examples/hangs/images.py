"""Only rank 0 has an image, so only rank 0 runs the vision tower."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.text = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens, image=None):
        return self.text(tokens if image is None else tokens + self.tower(image))


torch.manual_seed(0)
model = Model()
for part in (model.tower, model.text):
    fully_shard(part)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    image = torch.ones(4, 8) if rank == 0 else None
    model(torch.ones(4, 8), image).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"rank {rank}, step {step}: gradient norm {norm.full_tensor():.4f}", flush=True)
dist.destroy_process_group()
