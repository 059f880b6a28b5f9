"""Muon on shards against torch.optim.Muon on whole matrices."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.support import ranks, slow
from tests.support.replicas import mesh_of

STEPS = 20
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
# Rows that divide by no world; fewer rows than ranks; no rows; wide, tall and square ones.
SHAPES = {"tall": (13, 6), "wide": (7, 10), "square": (12, 12), "two_rows": (2, 9), "empty": (0, 5), "never": (4, 4)}


class Matrices(nn.Module):
    """A matrix of each of SHAPES. "never" gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))


@functools.cache
def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items() if name != "never"}


def on_one_process(**options: object) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = Matrices()
    optimizer = torch.optim.Muon(model.parameters(), **OPTIONS | options)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            model.get_parameter(name).grad = gradient.clone()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _steps(rank: int, world: int, shape: tuple[int, ...], backend: str, options: dict) -> dict[str, torch.Tensor]:
    from odc_triton import full_parameters, fully_shard
    from odc_triton.optim import Muon

    model = fully_shard(Matrices(), mesh=mesh_of(shape), backend=backend)
    sharded = {parameter.name: parameter for parameter in model._odc_engine.parameters}
    optimizer = Muon(model.parameters(), **OPTIONS | options)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            model.get_parameter(name).grad = sharded[name].storage.own_part(gradient)
        optimizer.step()
    return dict(full_parameters(model))


@pytest.mark.parametrize(
    ("shape", "backend", "options"),
    [
        ((1,), "cpu", {}),
        ((2,), "cpu-apart", {"nesterov": False, "momentum": 0.8}),
        ((3,), "cpu", {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
        ((4,), "cpu-apart", {}),
        ((2, 2), "cpu", {}),
        slow((2, 2), "cpu-apart", {}),
    ],
)
def test_the_same_gradients_give_the_same_weights(shape: tuple[int, ...], backend: str, options: dict) -> None:
    want = on_one_process(**options)
    for got in ranks.run(_steps, torch.Size(shape).numel(), shape, backend, options):
        assert got.keys() == want.keys()
        for name, value in want.items():
            # The rows are the same bits, and so is the product of one rank on the same processor.
            torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
