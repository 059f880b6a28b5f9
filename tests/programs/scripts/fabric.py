"""A loop of Lightning Fabric: torchrun … fabric.py OPTIMIZER ASSIGNMENT MODEL OUT [CHECKPOINT]. It goes on from there.

ASSIGNMENT: even, all ranks have equally many sequences of a step; uneven, about equally many tokens, and some have
none.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

OPTIMIZERS = {
    "sgd": (torch.float64, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "adamw": (torch.float32, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)),
}
LENGTHS = {  # of each step's sequences
    "even": [(30, 7, 19, 64), (12, 90, 9, 8), (50, 49), (25, 41, 16, 33), (88, 10), (7, 20, 30, 11)],
    "uneven": [(30, 7, 19, 64), (12, 90, 9, 8), (50,), (25, 41, 16, 33), (88, 10, 5), (7, 20, 30, 11)],
}
optimizer, assignment, pretrained, out, *checkpoint = sys.argv[1:]
dtype, make_optimizer = OPTIMIZERS[optimizer]
world = int(os.environ["WORLD_SIZE"])


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def assigned(sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's sequences."""
    if assignment == "even":
        return sequences[fabric.global_rank :: world]
    mine, tokens = [[] for _ in range(world)], [0] * world
    for ids in sorted(sequences, key=torch.numel, reverse=True):
        least = tokens.index(min(tokens))
        mine[least].append(ids)
        tokens[least] += ids.numel()
    return mine[fabric.global_rank]


fabric = Fabric(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=world,
    strategy=ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1),
)
fabric.launch()
model = fabric.setup_module(AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype))
optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
state = {"model": model, "optimizer": optimizer, "step": 0}
if checkpoint:
    fabric.load(checkpoint[0], state)
for step in range(state["step"], 6):
    generator = torch.Generator().manual_seed(step)
    sequences = [torch.randint(0, 97, (1, length), generator=generator) for length in LENGTHS[assignment][step]]
    mine = [ids.to(fabric.device) for ids in assigned(sequences)]
    tokens = fabric.all_reduce(torch.tensor(sum(ids.numel() - 1 for ids in mine)), reduce_op="sum")
    for at, ids in enumerate(mine):
        with fabric.no_backward_sync(model, enabled=at < len(mine) - 1):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (ids.numel() - 1)
            fabric.backward(loss * world / tokens)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"step {step}: norm {float(norm):.6f}, {len(mine)} sequences on rank 0")
    if step == 2:
        fabric.save(Path(out) / "checkpoint", {**state, "step": step + 1})
weights = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if fabric.is_global_zero:
    model.module.save_pretrained(out, state_dict=weights)
