"""`p.grad` inside a minibatch: using it is an error, as the ranks' gradients are summed at its end."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from odc_triton import MinibatchFailed, fully_shard, minibatch
from tests.support import ranks
from tests.support.refusals import caught

USES = {
    "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "clip_grad_norm_ foreach": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True),
    "clip_grad_norm_ loop": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
    "clip_grad_value_": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
    "get_total_norm": lambda parameters: nn.utils.get_total_norm([p.grad for p in parameters]),
    "scale": lambda parameters: parameters[0].grad.mul_(2),
    "norm": lambda parameters: parameters[0].grad.norm(),
    "view": lambda parameters: parameters[0].grad.T,
    "data": lambda parameters: parameters[0].grad.data,
    "item": lambda parameters: parameters[-1].grad[0].item(),
    "numpy": lambda parameters: parameters[0].grad.numpy(),
    "list": lambda parameters: parameters[0].grad.tolist(),
    "clone": lambda parameters: parameters[0].grad.clone(),
    "sum": lambda parameters: sum(p.grad.pow(2).sum() for p in parameters),
    "full_tensor": lambda parameters: parameters[0].grad.full_tensor(),
    "local": lambda parameters: parameters[0].grad.to_local(),
}


def _used(rank: int, world: int) -> tuple[dict[str, str], dict[str, object]]:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    said: dict[str, str] = {}

    def use_all(when: str) -> None:
        said.update({f"{name} {when}": caught(partial(use, parameters)) for name, use in USES.items()})

    seen: dict[str, object] = {}
    with minibatch(model):
        use_all("before the backward")
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        use_all("after zero_grad and the backward")
        gradient = parameters[0].grad
        seen["shape"], seen["repr"] = gradient.shape == parameters[0].shape, repr(gradient)
    seen["landed"] = nn.utils.clip_grad_norm_(parameters, 1e9).item()
    optimizer.step()
    for failing in (ValueError, KeyboardInterrupt):  # the second tells the peers, and waits for nobody
        try:
            with minibatch(model):
                raise failing("a microbatch failed")
        except (MinibatchFailed, failing):
            seen[failing.__name__] = [p.grad for p in parameters]
    return said, seen


def _assigned(rank: int, world: int) -> list[str]:
    model = fully_shard(nn.Linear(3, 2))

    def step(assigns: bool) -> None:
        with minibatch(model):
            model(torch.ones(1, 3)).sum().backward()
            if assigns:
                model.weight.grad = torch.ones_like(model.weight)

    return [caught(partial(step, assigns)) for assigns in (rank == 0, False)]


def test_a_gradient_is_not_used_before_the_end() -> None:
    used, assigned = ranks.run_all(2, _used, _assigned)
    for said, seen in used:
        for name, text in said.items():
            assert text.startswith("RuntimeError: "), name
            assert "Clip, scale and read gradients after the `with minibatch(...)` block" in text, name
        assert len(said) == 2 * len(USES)
        assert seen["shape"]
        assert "PendingGradient" in seen["repr"]
        assert seen["landed"] > 0
        assert seen["ValueError"] == seen["KeyboardInterrupt"] == [None] * 4
    for first, second in assigned:  # it would be lost
        assert first.startswith("MinibatchFailed: ")
        assert "rank 0: RuntimeError: p.grad of weight was assigned inside the minibatch" in first
        assert second == "nothing was raised"


def test_a_plain_tensor_as_gradient_is_dropped_at_the_entry() -> None:
    model = fully_shard(nn.Linear(2, 2, bias=False))
    model.weight.grad = torch.ones(2, 2)  # torch lets it
    with minibatch(model, tokens=1):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.to_local().tolist() == [[1.0, 1.0], [1.0, 1.0]]
