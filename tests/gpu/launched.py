"""What tests start by `launch`: its processes import this module and must not ask CUDA for anything by that.

A process reads CUDA_VISIBLE_DEVICES when it asks for the first time. The marks of the tests ask.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn


class Blocks(nn.Module):
    """Large enough, from a width of 1024, that reading a block before its copy has ended would show."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def launched(gpus: int, masked: bool) -> tuple[str, int, float]:
    if masked:  # before CUDA is asked for anything
        os.environ["CUDA_VISIBLE_DEVICES"] = str(int(os.environ.pop("LOCAL_RANK")) % gpus)
    try:
        return one_step()
    finally:
        dist.destroy_process_group()


def one_step() -> tuple[str, int, float]:
    """What the group communicates by, this rank's GPU, the gradients' norm: every rank has the same rows."""
    from odc_triton import fully_shard, minibatch

    model = fully_shard(Blocks(64))
    with minibatch(model):
        model(torch.ones(4, 64, device="cuda")).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    found = dist.get_backend_config(), torch.cuda.current_device(), norm
    torch.cuda.synchronize()
    dist.barrier()  # nobody's memory goes while it is still read
    return found
