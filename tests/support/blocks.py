"""Models of a few blocks, small enough for tests that start many ranks, and which of their units are whole."""

from __future__ import annotations

import torch
from torch import nn


class Blocks(nn.Module):
    def __init__(self, width: int = 4, out: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def filled(model: nn.Module) -> list[str]:
    """Names of the units that have whole parameters now."""
    return sorted(unit.name for unit in model._odc_engine.units if any(each.is_filled for each in unit.gathered))
