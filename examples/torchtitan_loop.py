"""A trainer as torchtitan's, by on-demand communication: torchrun --nproc-per-node 2 THIS_FILE

The units are those of its apply_fsdp_to_decoder, the step is that of its Trainer.train_step: losses divided by the
tokens of all ranks, gradients not divided. It has the model and the sequences of fsdp2.py, and prints the same losses.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import minibatch, use_odc

LENGTHS = [30, 7, 19, 64, 12, 25, 9, 41]  # tokens of one step's sequences, of all ranks together


def apply_fsdp(model: Qwen2ForCausalLM, mesh: DeviceMesh) -> None:
    config = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    fully_shard(model.model.embed_tokens, **config)
    fully_shard([model.model.norm, model.lm_head], **config, reshard_after_forward=False)
    for block in model.model.layers:
        fully_shard(block, **config)
    fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # torchtitan's disable_fsdp_gradient_division


class Trainer:
    def __init__(self) -> None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        self.device = torch.device(device_type, self.mesh.get_rank() if device_type == "cuda" else None)
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        self.model = Qwen2ForCausalLM(config).to(self.device)
        apply_fsdp(self.model, self.mesh)
        use_odc(self.model)  # after checkpointer.load, if there is one
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batches(self, step: int) -> Iterator[torch.Tensor]:
        """This rank's sequences of a step: rank 0 has the three longest, the others share the rest."""
        generator = torch.Generator().manual_seed(step)
        sequences = [torch.randint(0, 256, (1, length), generator=generator) for length in LENGTHS]
        sequences.sort(key=torch.numel, reverse=True)
        rank, world = self.mesh.get_rank(), self.mesh.size()
        yield from sequences if world == 1 else sequences[:3] if rank == 0 else sequences[2 + rank :: world - 1]

    def forward_backward_step(self, ids: torch.Tensor, global_valid_tokens: int) -> torch.Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum") / global_valid_tokens
        loss.backward()
        return loss.detach()

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        microbatches = [ids.to(self.device) for ids in self.batches(step)]
        local_valid_tokens = sum(ids.numel() - 1 for ids in microbatches)
        loss = torch.zeros((), device=self.device)
        with minibatch(self.model, tokens=local_valid_tokens) as mb:  # in place of dist_sum_tensor
            for ids in microbatches:
                loss += self.forward_backward_step(ids, mb.tokens)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}")


dist.init_process_group()
trainer = Trainer()
for step in range(5):
    trainer.train_step(step)
dist.destroy_process_group()
