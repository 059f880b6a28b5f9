"""The engine and the kernels together: training steps whose reads and additions are all kernels', against eager."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support import slow

from tests.support import place  # isort: skip

from bench.kernels.problem import DEVICE
from odc_kernels.gather import gather
from odc_kernels.peers import PeerShards
from odc_kernels.wgrad import wgrad
from odc_triton.comm.layout import shard_rows
from tests.support import ranks

pytestmark = [] if place.INTERPRETED else [pytest.mark.gpu]
BACKEND = "cpu-interpreter" if place.INTERPRETED else "cuda"
STEPS = 2


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 19), nn.GELU(), nn.Linear(19, 7), nn.GELU(), nn.Linear(7, 3))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 3 + 4 * rank  # ranks have different amounts of work
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def _sharded(rank: int, world: int, choice: str, exact: bool) -> tuple[list[dict], dict, set[bool]]:
    """Gradient shards of each step, whole weights at the end, and whether `wgrad` added to exact sums."""
    from odc_triton import full_parameters, fully_shard, minibatch, repeating, replace_layers
    from tests.support.simulated import InterpreterBackend

    InterpreterBackend.gathers_by_kernel = True
    model = _model()
    if choice != "gathered":
        replace_layers(model, roles=["linear"], choice=choice, verbose=False)
    fully_shard(model, backend=BACKEND, exact=exact)
    if choice == "gathered":
        assert all(parameter.gathered._small for parameter in model._odc_engine.parameters), "by one launch"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, seen = [], set()

    def adds(*, weight: PeerShards, bias: PeerShards, **given: Any) -> None:
        seen.update(peers.exact is not None for peers in (weight, bias))
        wgrad(weight=weight, bias=bias, **given)

    for step in range(STEPS):
        x, y = (value.to(DEVICE) for value in _batch(step, rank))

        def run(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            with minibatch(model, tokens=len(x)) as mb:
                (nn.functional.mse_loss(model(x), y, reduction="sum") / mb.tokens).backward()

        with mock.patch("odc_kernels.wgrad.wgrad", adds):
            repeating(run)
        if exact:  # an element may have been added to once
            assert {parameter.shard.target.sum.additions for parameter in model._odc_engine.parameters} == {1}
        gradients.append({name: p.grad.to_local().cpu().clone() for name, p in model.named_parameters()})
        optimizer.step()
    weights = dict(full_parameters(model))  # waits until every owner has stepped
    for parameter in model._odc_engine.parameters:
        whole = torch.full(parameter.spec.shape, torch.nan, device=DEVICE)
        gather(peers=parameter.compute_peers, out=whole, block=64)
        assert torch.equal(whole, weights[parameter.name])
    return gradients, {name: value.cpu() for name, value in weights.items()}, seen


CASES = [
    (3, "gathered", False),
    (3, "triton/direct/fused", True),
    (2, "triton/staged/whole", False),
    slow(1, "triton/direct/fused", False),
    slow(2, "triton/staged/fused", True),
]


@pytest.mark.parametrize(("world", "choice", "exact"), CASES)
def test_steps_equal_eager(world: int, choice: str, exact: bool) -> None:
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
    for rank, (gradients, weights, seen) in enumerate(ranks.run(_sharded, world, choice, exact)):
        assert seen == ({exact} if choice.endswith("fused") else set())
        # fp32 sums in another order: two steps of a small network.
        for step, (got, want) in enumerate(zip(gradients, wanted, strict=True)):
            for name, whole in want.items():
                gradient = whole[slice(*shard_rows(len(whole), world, rank))]
                torch.testing.assert_close(
                    got[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, at=(step, name): f"{at}: {m}"
                )
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-5, atol=1e-6)
