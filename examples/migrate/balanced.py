"""A small causal LM on sequences of many lengths: torchrun --nproc-per-node 2 THIS_FILE"""

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import fully_shard, minibatch, record_timeline
from odc_triton.balance import CostModel, assign_one

LENGTHS = [30, 7, 19, 64, 12, 25, 9, 41]  # tokens of one step's sequences, of all ranks together

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
config.update({"hidden_size": 256, "intermediate_size": 2048})
LENGTHS = [12 * length for length in LENGTHS]
model = Qwen2ForCausalLM(config).to(device)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
recording = record_timeline(model)


def summed_loss(ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss * (ids.numel() - 1)


for step in range(5):
    generator = torch.Generator().manual_seed(step)
    sequences = [torch.randint(0, 256, (1, length), generator=generator) for length in LENGTHS]
    packs = assign_one(
        LENGTHS, rank=rank, ranks=world, balance="mini", token_cap=max(LENGTHS), cost=CostModel.from_config(config)
    )
    mine = [sequences[index].to(device) for pack in packs for index in pack]
    targets = sum(ids.numel() - 1 for ids in mine)
    losses = []
    with minibatch(model, tokens=targets) as mb:
        for ids in mine:
            losses.append(summed_loss(ids))
            (losses[-1] / mb.tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(summed := torch.stack(losses).detach().sum())
    if rank == 0:
        print(f"step {step} loss {summed.item() / sum(length - 1 for length in LENGTHS):.6f}")
recording.save("out/migrate", "ODC balanced by cost")
dist.destroy_process_group()
