"""A loss of one's own. Runs as is, on one rank, or: torchrun --nproc-per-node 2 THIS_FILE"""

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import fully_shard, log_probs
from odc_triton.balance import MinibatchSampler, PackedDataset, pack_collate
from odc_triton.hf import enable_packing
from odc_triton.objectives import Objective, evaluate, predictions, run_step


class Focal(Objective):
    """-(1 - p)^2 log p of each target token: likely ones count less."""

    def loss(self, model, pack, terms):
        logits, targets = predictions(model, pack)  # of the pack's target tokens, in their order
        logp = log_probs(logits, targets).logp
        summed = -((1 - logp.exp()) ** 2 * logp).sum()
        return summed / terms.number, {"likely": (logp > -1).sum()}  # added up over packs and ranks


torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
enable_packing(model)
model = fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

lengths = [30, 7, 19, 64, 12, 25, 9, 41]
data = [{"input_ids": torch.arange(length) * 3 % 64} for length in lengths]
dataset, rank, world = PackedDataset(data), dist.get_rank(), dist.get_world_size()
how = {"rank": rank, "world": world, "targets": [length - 1 for length in lengths]}
sampler = MinibatchSampler(lengths, 4 // world, 64, **how)  # four samples a step, packs of 64 tokens


def collate(pack):
    return pack_collate([dataset[pack]])[0]


for step, packs in enumerate(packs for _ in range(20) for packs in sampler):
    report = run_step(model, packs, Focal(), collate=collate)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 0:
        likely = f"{report.sums['likely']:.0f} of {report.terms} tokens are likely"
        print(f"step {step}: loss {report.loss:.3f}, {likely}")
found = evaluate(model.eval(), sampler, Focal(), collate=collate)
if rank == 0:
    print(f"evaluation: loss {found.loss / found.terms:.3f}")
dist.destroy_process_group()
