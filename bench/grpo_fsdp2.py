"""The baseline of GRPO: the same job, whose updates are FSDP2's, with global packing.

Rollouts stay as they are, so both see the same sampler. A model of torch's fully_shard has the weights and the
optimizer; after each update they are copied to the model that samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc_triton import publish
from odc_triton.balance import assign
from odc_triton.balance.pieces import Entry
from odc_triton.comm.layout import find_units
from odc_triton.hf import enable_packing
from odc_triton.rl.learned import Learned
from odc_triton.train import grpo
from odc_triton.train.agreement import Agreed
from odc_triton.train.grpo_options import GrpoOptions
from odc_triton.train.grpo_run import GrpoRun
from odc_triton.train.metrics import Metrics

from .variants import Setting, shard_by_fsdp2


class Fsdp2Run(GrpoRun):
    """GRPO whose updates are made by FSDP2's collectives, layer by layer."""

    def __init__(self, **given: Any) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(**given)
        self.twin = AutoModelForCausalLM.from_pretrained(self.options.model).train()
        enable_packing(self.twin)
        blocks = [self.twin.get_submodule(name) for name in find_units(self.twin)]
        shard_by_fsdp2(self.twin, blocks, Setting())
        self.twin_optimizer = torch.optim.AdamW(self.twin.parameters(), lr=self.options.lr, weight_decay=0.0)

    def _minibatch(self, batch: Learned, packs: Iterable[list[Entry]], split: Any) -> tuple[float, list[float]]:
        world, rank = dist.get_world_size(), dist.get_rank()
        while len(batch.samples) % world:  # FSDP2 needs as many on every rank: one more, that weighs nothing
            for of_samples in (batch.samples, batch.advantage, batch.sampled):
                of_samples.append(of_samples[0])
            batch.weight.append(0.0)
        cap, cost = self.options.token_cap, self.dealer.cost
        dealt = assign(batch.lengths, ranks=world, token_cap=cap, balance="global", cost=cost)
        total = 0.0
        for entries in dealt[rank]:
            loss, _ = batch.loss(
                entries,
                model=self.twin,
                reference=None,
                objective=self.objective,
                temperature=self.options.temperature,
                correction=None,
                device=torch.device("cpu"),
            )
            (loss * world).backward()
            total += loss.item()
        return total, []

    def update(self, loss_sum: float, sums: Any = ()) -> Agreed:
        norm = nn.utils.clip_grad_norm_(self.twin.parameters(), self.options.clip_norm).full_tensor()
        for group in self.twin_optimizer.param_groups:
            group["lr"] = self.lr
        self.twin_optimizer.step()
        self.twin_optimizer.zero_grad()
        sampling = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.twin.named_parameters():
                whole = value.full_tensor()
                own = sampling[name]
                rows = own.to_local()
                start = math.ceil(len(whole) / dist.get_world_size()) * dist.get_rank()
                rows.copy_(whole[start : start + len(rows)])
        self.engine.meet("all have written the weights of FSDP2", {})
        publish(self.model)
        self.engine.meet("all have published the weights of FSDP2", {})
        return Agreed(loss_sum=loss_sum, sums=[0.0] * 6, norm=norm.item(), idle=0.0, stop=None, save=False, writers=[])


def run_fsdp2(options: GrpoOptions) -> Metrics:
    """`run_grpo` with FSDP2's updates."""
    grpo.GrpoRun = Fsdp2Run
    return grpo.run_grpo(options)
