"""Meshes of replicas, and a model whose rows they split unevenly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NAMES = ("replicate", "shard")


def mesh_of(shape: tuple[int, ...]) -> Any:
    names = NAMES if len(shape) == 2 else ("shard",)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


class Rows(nn.Module):
    """7, 1, 2 and no rows over 2 x 2 ranks; one frozen; one unused; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.seven, self.one, self.two = nn.Linear(4, 7), nn.Linear(7, 1), nn.Linear(7, 2)
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen, self.never = nn.Linear(4, 4), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("offset", torch.ones(4))

    def reset_parameters(self) -> None:
        """Resets its own tensors; children reset theirs."""
        nn.init.constant_(self.scale, 2.0)
        nn.init.ones_(self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.seven(self.frozen(x + self.offset.to(x.dtype))))
        return (self.one(x).sum() + self.two(x).sum() + self.empty.sum()) * self.scale
