"""accelerate's FSDP2 by on-demand communication: torchrun --nproc-per-node 2 THIS_FILE [FOLDER]

It has the model and the sequences of fsdp2.py, and prints the same losses. Sequences are assigned by their lengths, so
ranks have different numbers of microbatches. With FOLDER the end state is saved there.
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import minibatch, use_odc

LENGTHS = [30, 7, 19, 64, 12, 25, 9, 41]  # tokens of one step's sequences, of all ranks together

if not torch.cuda.is_available():  # accelerate uses the plugin only on GPUs: here a CPU's ranks pass for GPUs'
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
accelerator = Accelerator(fsdp_plugin=plugin)
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
model = Qwen2ForCausalLM(config)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
use_odc(model)


def assign(sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's: the longest first, each to the rank that has the fewest tokens."""
    assigned, tokens = [[] for _ in range(world)], [0] * world
    for ids in sorted(sequences, key=torch.numel, reverse=True):
        least = tokens.index(min(tokens))
        assigned[least].append(ids.to(accelerator.device))
        tokens[least] += ids.numel()
    return assigned[rank]


for step in range(5):
    generator = torch.Generator().manual_seed(step)
    mine = assign([torch.randint(0, 256, (1, length), generator=generator) for length in LENGTHS])
    summed = torch.zeros((), device=accelerator.device)
    with minibatch(model, tokens=sum(ids.numel() - 1 for ids in mine)) as mb:  # instead of accelerator.accumulate
        for ids in mine:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (ids.numel() - 1) / mb.tokens
            accelerator.backward(loss)
            summed += loss.detach()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    summed = accelerator.reduce(summed)
    accelerator.print(f"step {step} loss {summed.item():.6f}")
if len(sys.argv) > 1:
    accelerator.save_state(sys.argv[1])
accelerator.end_training()
