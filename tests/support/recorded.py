"""Matrices stepped by recorded gradients: by Muon, and the rest by AdamW, on shards and on whole tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc_triton import full_parameters, fully_shard
from odc_triton.optim import ChainedOptimizer, Muon
from tests.support.replicas import mesh_of

# Rows that divide by no world, tall, wide and square; fewer rows than ranks; no rows; one that gets no gradient.
MATRICES = {"tall": (13, 6), "wide": (7, 10), "square": (12, 12), "two_rows": (2, 9), "empty": (0, 5), "never": (4, 4)}
OTHERS = {"embedding": (11, 3), "bias": (7,)}
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


class Matrices(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (MATRICES | OTHERS).items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def matrices(self) -> list[nn.Parameter]:
        return [self.get_parameter(name) for name in MATRICES]

    def others(self) -> list[nn.Parameter]:
        return [self.get_parameter(name) for name in OTHERS]


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(s, generator=generator) for name, s in (MATRICES | OTHERS).items() if name != "never"}


def plain(steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after `steps`, by torch on one process."""
    torch.set_num_threads(1)
    model = Matrices()
    optimizers = [torch.optim.Muon(model.matrices(), **OPTIONS | options), torch.optim.AdamW(model.others(), **OPTIONS)]
    for step in range(steps):
        for name, gradient in gradients(step).items():
            model.get_parameter(name).grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def sharded(shape: tuple[int, ...], backend: str, *, seed: int = 1, **options: Any) -> tuple[Matrices, Any]:
    """The model on a mesh of that shape, and its optimizer."""
    model = fully_shard(Matrices(seed), mesh=mesh_of(shape), backend=backend)
    muon = Muon(model.matrices(), **OPTIONS | options)
    return model, ChainedOptimizer(muon, torch.optim.AdamW(model.others(), **OPTIONS))


def give_gradients(model: Matrices, step: int) -> None:
    own = {parameter.name: parameter.shard.own_part for parameter in model._odc_engine.parameters}
    for name, gradient in gradients(step).items():
        model.get_parameter(name).grad = own[name](gradient)


def step_on(model: Matrices, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    """Steps with the recorded gradients; returns the whole weights."""
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
    weights = dict(full_parameters(model))
    dist.barrier()  # others may still be reading this rank's rows
    return weights
