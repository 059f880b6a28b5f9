"""A model of plain parameters for the simulator."""

from __future__ import annotations

import torch
from torch import nn

from odc_triton.balance import CostModel
from odc_triton.tools.simulate.models import Model


def toy(blocks: list[tuple[int, int]], *, root: tuple[int, int], cost: CostModel) -> Model:
    """Of one matrix per block, and one of the root."""

    def holder(shape: tuple[int, int]) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(shape, device="meta"))
        return module

    module = holder(root)
    module.blocks = nn.ModuleList(map(holder, blocks))
    return Model(name="toy", module=module, cost=cost)
