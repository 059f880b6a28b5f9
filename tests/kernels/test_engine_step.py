"""The engine and the kernels together: training steps whose reads and additions are all kernels', against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from . import place  # isort: skip

from bench.operators.place import DEVICE
from odc_kernels.gather import gather
from odc_kernels.linear import linear, linear_dx
from odc_kernels.tiles import LinearTile, WgradTile
from odc_kernels.wgrad import wgrad
from odc_triton.plan import shard_rows
from tests import ranks

pytestmark = [] if place.INTERPRETED else [pytest.mark.gpu]
BACKEND = "cpu-interpreter" if place.INTERPRETED else "cuda"
LINEAR_TILE = LinearTile(t=16, n=16, k=16)
WGRAD_TILE = WgradTile(n=16, k=16, t=16, group=2)
STEPS = 3


class _OnPeers(torch.autograd.Function):
    """y = x Wᵀ + b with W and b read from their owners; dW and db added to their owners, so None is returned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sharded: tuple) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.sharded = sharded
        y = x.new_full((len(x), weight.shape[0]), torch.nan)
        of_weight, of_bias = (parameter.compute_peers for parameter in sharded)
        linear(x=x, weight=of_weight, bias=of_bias, out=y, tile=LINEAR_TILE)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.sharded
        dx = torch.full_like(x, torch.nan)
        linear_dx(dy=dy.contiguous(), weight=weight.compute_peers, out=dx, tile=LINEAR_TILE)
        if ctx.needs_input_grad[1]:
            peers = weight.gradient_peers, bias.gradient_peers
            wgrad(dy=dy.contiguous(), x=x, weight=peers[0], bias=peers[1], tile=WGRAD_TILE)
            weight.touched = bias.touched = True
        return dx, None, None, None


class _KernelLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _OnPeers.apply(x, self.weight, self.bias, self.sharded)


def _model(linear_class: type[nn.Linear] = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(linear_class(5, 19), nn.GELU(), linear_class(19, 7), nn.GELU(), nn.Linear(7, 3))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 3 + 4 * rank  # ranks have different amounts of work
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def _sharded(rank: int, world: int) -> tuple[list[dict], dict]:
    from odc_triton import full_parameters, fully_shard, minibatch

    model = fully_shard(_model(_KernelLinear), backend=BACKEND)
    by_leaf = {id(parameter.leaf): parameter for parameter in model._odc_engine.parameters}
    model._odc_unit.make_whole()
    for module in model.modules():
        if isinstance(module, _KernelLinear):
            module.sharded = by_leaf[id(module.weight)], by_leaf[id(module.bias)]
    model._odc_unit.make_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(STEPS):
        x, y = (value.to(DEVICE) for value in _batch(step, rank))
        with minibatch(model, tokens=len(x)) as mb:
            (nn.functional.mse_loss(model(x), y, reduction="sum") / mb.tokens).backward()
        gradients.append({name: p.grad.to_local().cpu().clone() for name, p in model.named_parameters()})
        optimizer.step()
    weights = dict(full_parameters(model))  # waits until every owner has stepped
    for parameter in model._odc_engine.parameters:
        whole = torch.full(parameter.spec.shape, torch.nan, device=DEVICE)
        gather(peers=parameter.compute_peers, out=whole, block=64)
        assert torch.equal(whole, weights[parameter.name])
    return gradients, {name: value.cpu() for name, value in weights.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps_equal_eager(world: int) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for step in range(STEPS):
        batches = [_batch(step, rank) for rank in range(world)]
        total = sum(len(x) for x, _ in batches)
        optimizer.zero_grad()
        for x, y in batches:
            (nn.functional.mse_loss(model(x), y, reduction="sum") / total).backward()
        wanted.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    for rank, (gradients, weights) in enumerate(ranks.run(_sharded, world)):
        # fp32 sums in another order: three steps of a small network.
        for step, (got, want) in enumerate(zip(gradients, wanted, strict=True)):
            for name, whole in want.items():
                gradient = whole[slice(*shard_rows(len(whole), world, rank))]
                torch.testing.assert_close(
                    got[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, at=(step, name): f"{at}: {m}"
                )
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-5, atol=1e-6)
