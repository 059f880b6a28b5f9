"""What examples/ray_train.py computes, by one process of plain torch: python ray_alone.py EXAMPLE OUT."""

import runpy
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

assigned = runpy.run_path(sys.argv[1])["ASSIGNED"]
torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
targets = sum(tokens - 1 for worker in assigned for tokens in worker)
for step in range(6):
    for rank, worker in enumerate(assigned):
        generator = torch.Generator().manual_seed(len(assigned) * step + rank)
        for tokens in worker:
            ids = torch.randint(0, 256, (1, tokens), generator=generator)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (tokens - 1) / targets
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
torch.save({name: value.detach() for name, value in model.state_dict().items()}, f"{sys.argv[2]}/weights.pt")
