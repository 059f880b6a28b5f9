"""Images under `use_odc`: batches of which only some ranks' have any, where FSDP2's ranks wait for each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc_triton import minibatch, use_odc
from odc_triton.comm.layout import find_units
from tests.support import ranks, slow
from tests.support.gradients import gradients_of
from tests.support.vision import FAMILIES, alone

IMAGES = (2, 0)  # of each rank's sample


def loss_of(model: nn.Module, family: str, rank: int) -> torch.Tensor:
    """Summed over the targets of the rank's sample."""
    sample = FAMILIES[family].sample(9, IMAGES[rank], seed=rank)
    return F.cross_entropy(alone(model, sample)[:-1], torch.tensor(sample["labels"])[1:], reduction="sum")


def _trained(rank: int, world: int, family: str) -> dict[str, torch.Tensor]:
    model = FAMILIES[family].model(dtype=torch.float64)
    for name in find_units(model):
        torch_fully_shard(model.get_submodule(name))
    with minibatch(use_odc(torch_fully_shard(model)), tokens=1):
        loss_of(model, family, rank).backward()
    return gradients_of(model)


@pytest.mark.parametrize("family", ["qwen2_5_vl", slow("gemma3")])
def test_gradients_are_those_of_one_process(family: str) -> None:
    model = FAMILIES[family].model(dtype=torch.float64)
    for rank in range(2):
        loss_of(model, family, rank).backward()
    torch.testing.assert_close(ranks.run(_trained, 2, family), [gradients_of(model)] * 2, rtol=0, atol=1e-10)
