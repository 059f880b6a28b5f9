"""A training loop of one's own. Runs as is, on one rank, or: torchrun --nproc-per-node 2 THIS_FILE"""

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import fully_shard, minibatch
from odc_triton.checkpoint import save_pretrained

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
model = fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # DTensor shards, as in FSDP2
rank = dist.get_rank()

for step in range(3):
    lengths = (30, 7, 19) if rank == 0 else (50,)  # any number of microbatches on each rank, or none
    packs = [torch.randint(0, 256, (1, length), device=model.device) for length in lengths]
    summed = torch.zeros((), device=model.device)
    with minibatch(model, tokens=sum(p.numel() - 1 for p in packs)) as mb:
        for ids in packs:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (ids.numel() - 1)
            (loss / mb.tokens).backward()  # mb.tokens: target tokens of all ranks together
            summed += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(summed)
    print(f"rank {rank}, step {step}: loss {summed.item() / mb.tokens:.3f}")

if rank == 0:
    save_pretrained(model, "out/model", overwrite=True)  # a folder for plain transformers
dist.barrier()
dist.destroy_process_group()
