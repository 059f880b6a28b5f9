"""What a failed backward or a write by hand leaves behind does not get into what a bridged model computes next."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from odc_triton.base.errors import MinibatchFailed
from odc_triton.engine.api import full_parameters, minibatch, publish
from tests.support import ranks

LR = 0.1


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def _bridged() -> tuple[nn.Module, torch.optim.Optimizer]:
    from odc_triton import use_odc

    model = _model()
    fully_shard(model[0])
    use_odc(fully_shard(model))
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def _batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with minibatch(model, tokens=1) as mb:
        (model(_batch(rank)).square().sum() / mb.tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _plain(world: int) -> nn.Module:
    model = _model()
    (sum(model(_batch(rank)).square().sum() for rank in range(world)) / world).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return model


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a backward failed")


def _after_a_failed_backward(rank: int, world: int) -> dict[str, torch.Tensor]:
    model, optimizer = _bridged()
    # The head's gradient is there, and has not been reduced.
    hook = model[1].register_forward_hook(lambda module, inputs, output: _Raises.apply(output) if rank else output)
    with pytest.raises(MinibatchFailed, match="rank 1: ValueError: a backward failed"), minibatch(model, tokens=1):
        model(_batch(9)).square().sum().backward()
    hook.remove()
    _step(model, optimizer, rank)
    return dict(full_parameters(model))


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 can't go on before torch 2.13")
def test_a_failed_backward() -> None:
    want = dict(_plain(2).named_parameters())
    for got in ranks.run(_after_a_failed_backward, 2):
        torch.testing.assert_close(got, {name: value.detach() for name, value in want.items()}, rtol=1e-6, atol=1e-7)


def _no_sync_between_forward_and_backward(rank: int, world: int) -> None:
    model, _ = _bridged()
    with minibatch(model):
        loss = model(_batch(rank)).square().sum()
        model.set_requires_gradient_sync(False)
        try:
            loss.backward()
        finally:
            model.set_requires_gradient_sync(True)


def test_gradients_that_would_stay_on_their_rank_are_refused() -> None:
    with ranks.start(_no_sync_between_forward_and_backward, 2) as job:
        for outcome in job.join():
            assert outcome.error_type == "MinibatchFailed"
            assert "set_requires_gradient_sync(False) on unit" in outcome.error


def _evaluates_what_was_loaded(rank: int, world: int) -> torch.Tensor:
    model, optimizer = _bridged()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    _step(model, optimizer, rank)
    model.load_state_dict(start)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"were written after they were published: call publish\(model\)"):
            model(_batch(7))
        publish(model)
        return model(_batch(7))


def test_what_was_loaded_is_published_before_it_is_read() -> None:
    want = _model()(_batch(7)).detach()
    for got in ranks.run(_evaluates_what_was_loaded, 2):
        torch.testing.assert_close(got, want)
